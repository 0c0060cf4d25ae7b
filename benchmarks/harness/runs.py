"""What the benchmarks share: real runs through the command line, their rows, and one JSON with the machine and the
command that made it."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pyarrow import parquet

WORKLOAD = Path(__file__).parents[1] / "workload"
CONCORD = Path(sys.executable).with_name("concord")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run."""

    summary: dict[str, Any]
    rows: list[dict[str, float]]
    """One a step."""
    wall_s: float
    """From the command to its end."""
    step_at_s: dict[int, float]
    """Seconds after the command at which a step's line was read."""
    cpu_samples: list[tuple[float, float]]
    """(seconds after the command, CPU seconds of all its processes so far), twice a second."""
    kind_samples: list[tuple[float, dict[str, float]]]
    """(seconds after the command, CPU seconds so far of Ray actors by class), twice a second."""
    rss_samples: list[tuple[float, float]]
    """(seconds after the command, MiB resident of all its processes), twice a second; shared pages count in each."""
    peak_rss_mb: float
    """Of all its processes together; shared pages count in each."""

    def cpu_s_per_step(self, first: int, last: int) -> float:
        """CPU seconds a step of all processes, between the ends of two steps."""
        begin, end = self.step_at_s[first], self.step_at_s[last]
        return (self._cpu_at(end) - self._cpu_at(begin)) / (last - first)

    def kind_cpu_s_per_step(self, kinds: Sequence[str], first: int, last: int) -> float:
        """CPU seconds a step of all actors of these classes, between the ends of two steps."""
        times = [at_s for at_s, _ in self.kind_samples]
        values = [sum(cpu.get(kind, 0.0) for kind in kinds) for _, cpu in self.kind_samples]
        begin, end = np.interp([self.step_at_s[first], self.step_at_s[last]], times, values)
        return float(end - begin) / (last - first)

    def _cpu_at(self, at_s: float) -> float:
        times, values = zip(*self.cpu_samples, strict=True)
        return float(np.interp(at_s, times, values))


class TreeSampler(threading.Thread):
    """CPU and memory of a process and all its descendants."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._begun = time.monotonic()
        self._cpu: dict[int, float] = {}
        self._ended = threading.Event()
        self.samples: list[tuple[float, float]] = []
        self.rss_samples: list[tuple[float, float]] = []
        self.kind_samples: list[tuple[float, dict[str, float]]] = []
        self._kinds: dict[int, str] = {}
        self.peak_rss = 0

    def run(self) -> None:
        while not self._ended.wait(0.5):
            self.sample()

    def sample(self) -> None:
        """One look."""
        rss = 0
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    rss += process.memory_info().rss
                    self._kinds[process.pid] = _kind(process)
            except psutil.NoSuchProcess:
                continue
            self._cpu[process.pid] = max(self._cpu.get(process.pid, 0.0), times.user + times.system)
        at_s = time.monotonic() - self._begun
        self.samples.append((at_s, sum(self._cpu.values())))
        self.rss_samples.append((at_s, rss / 2**20))
        by_kind: dict[str, float] = {}
        for pid, kind in self._kinds.items():
            by_kind[kind] = by_kind.get(kind, 0.0) + self._cpu.get(pid, 0.0)
        self.kind_samples.append((at_s, by_kind))
        self.peak_rss = max(self.peak_rss, rss)

    def end(self) -> None:
        """Stop sampling."""
        self._ended.set()
        self.join()


def _kind(process: psutil.Process) -> str:
    """Class of a Ray actor, from its title (`ray::Class` or `ray::Class.method`); empty for other processes."""
    title = (process.cmdline() or [""])[0]
    return title.removeprefix("ray::").partition(".")[0] if title.startswith("ray::") else ""


def model_with_context(folder: Path, tokens: int) -> Path:
    """A copy of the workload's model whose config allows `tokens` of context: scripted engines never load it."""
    shutil.copytree(WORKLOAD / "model", folder, dirs_exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": tokens}))
    return folder


def concord_run(settings: Mapping[str, object], config: Path | None = None, timeout_s: float = 900.0) -> Run:
    """Run `concord run` on `config` (default: all defaults) with `settings` over it, in a temporary folder.

    Raises:
        RuntimeError: the run failed; with the end of its output.
    """
    folder = Path(tempfile.mkdtemp(prefix="concord-bench-"))
    if config is None:
        config = folder / "bench.toml"
        config.touch()
    command = [str(CONCORD), "run", str(config)]
    for key, value in {"run.dir": str(folder / "runs"), "run.name": "bench", **settings}.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    begun = time.monotonic()
    errors = (folder / "stderr").open("w+")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | {"PYTHONPATH": str(WORKLOAD.parent)}
    )
    sampler = TreeSampler(process.pid)
    sampler.start()
    killer = threading.Timer(timeout_s, process.kill)
    killer.start()
    step_at_s: dict[int, float] = {}
    lines: list[str] = []
    for line in process.stdout or ():
        lines.append(line)
        if line.startswith('{"step"'):
            step_at_s[json.loads(line)["step"]] = time.monotonic() - begun
    code = process.wait()
    killer.cancel()
    sampler.end()
    if code:
        errors.seek(0)
        raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{''.join(lines[-5:])}\n{errors.read()[-4000:]}")
    directory = folder / "runs" / "bench"
    rows = [
        row for part in (directory / "metrics").glob("part-*.parquet") for row in parquet.read_table(part).to_pylist()
    ]
    summary = json.loads((directory / "summary.json").read_text())
    shutil.rmtree(folder)
    return Run(
        summary=summary,
        rows=sorted(rows, key=lambda row: row["step"]),
        wall_s=time.monotonic() - begun,
        step_at_s=step_at_s,
        cpu_samples=sampler.samples,
        rss_samples=sampler.rss_samples,
        kind_samples=sampler.kind_samples,
        peak_rss_mb=round(sampler.peak_rss / 2**20, 1),
    )


def machine() -> dict[str, object]:
    """Where the figures come from."""
    memory_gib = round(psutil.virtual_memory().total / 2**30, 1)
    return {
        "cpus": os.cpu_count(),
        "memory_gib": memory_gib,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


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
