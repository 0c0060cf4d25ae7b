"""What the benchmarks share: real runs through the command line, their rows, and one JSON with the machine and the command that made it."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pyarrow import parquet

WORKLOAD = Path(__file__).parent / "workload"
CONCORD = Path(sys.executable).with_name("concord")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run."""

    summary: dict[str, Any]
    rows: list[dict[str, float]]
    """One a step."""
    wall_s: float


def model_with_context(folder: Path, tokens: int) -> Path:
    """A copy of the workload's model whose config allows `tokens` of context: scripted engines never load it."""
    shutil.copytree(WORKLOAD / "model", folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": tokens}))
    return folder


def toml_value(value: object) -> str:
    """A scalar in TOML syntax."""
    return json.dumps(value)


def concord_run(settings: Mapping[str, object], base: str = "", timeout_s: float = 900.0, keep: Path | None = None) -> Run:
    """Run `concord run` on a config of `base` (TOML text) and overriding `settings` in a temporary folder.

    Raises:
        RuntimeError: the run failed; with the end of its output.
    """
    folder = Path(tempfile.mkdtemp(prefix="concord-bench-"))
    config = folder / "bench.toml"
    config.write_text(base)
    everything = {"run.dir": str(folder / "runs"), "run.name": "bench", **settings}
    command = [str(CONCORD), "run", str(config)]
    for key, value in everything.items():
        command += ["--set", f"{key}={toml_value(value)}"]
    before = os.times()
    process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    after = os.times()
    directory = folder / "runs" / "bench"
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}")
    rows = [row for part in sorted((directory / "metrics").glob("part-*.parquet")) for row in parquet.read_table(part).to_pylist()]
    summary = json.loads((directory / "summary.json").read_text())
    if keep is not None:
        shutil.copytree(directory, keep, dirs_exist_ok=True)
    shutil.rmtree(folder)
    return Run(summary=summary, rows=sorted(rows, key=lambda row: row["step"]), wall_s=after.elapsed - before.elapsed)


def machine() -> dict[str, object]:
    """Where the figures come from."""
    memory_gib = round(psutil.virtual_memory().total / 2**30, 1)
    return {"cpus": os.cpu_count(), "memory_gib": memory_gib, "python": platform.python_version(), "platform": platform.platform()}


def report(results: Mapping[str, object], arguments: argparse.Namespace) -> None:
    """Print the JSON, and write it where `--out` says."""
    text = json.dumps({"command": " ".join(["python", *sys.argv]), "machine": machine(), **results}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """An argument parser with `--out`."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--out", type=Path, default=None, help="also write the JSON to this file")
    return made
