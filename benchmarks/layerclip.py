"""What an exploding block costs under each clip: reward over steps of short runs with a block whose gradient grows a
thousandfold every so often.

Each arm is a run of a tiny model with random weights, torch engine, on one warm Ray cluster; the reward is the share of
digits. `healthy` has no fault. The figure (`--figure FILE.svg`) has a curve an arm, the mean over seeds.
"""

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.layerclip_figure import drawn, table
from harness.rehearsal_cases import CASES, model_of
from harness.runs import CONCORD, parser, report
from pyarrow import parquet
from rehearsal import settings

from actors.cluster import cluster
from actors.config import ClusterConfig

TIMEOUT_S = 900.0
WARMUP_STEPS = 10
ARMS: Mapping[str, dict[str, Any]] = {
    "healthy": {"type": "global"},
    "layerclip": {"type": "layerclip", "warmup_steps": WARMUP_STEPS},
    "global": {"type": "global"},
    "zclip": {"type": "zclip", "warmup_steps": WARMUP_STEPS},
    "adagc": {"type": "adagc", "warmup_steps": WARMUP_STEPS},
}
"""Name -> `trainer.optimizer.clip`; all but the first have the fault."""


def document(arm: str, seed: int, steps: int, every: int, model: Path, runs: Path) -> dict[str, dict[str, Any]]:
    """The config of one run, in `runs/run`."""
    made: dict[str, dict[str, Any]] = {
        "run": {"steps": steps, "batch_groups": 4, "group_size": 4, "seed": seed, "dir": str(runs), "name": "run"},
        "model": {"type": "local", "path": str(model)},
        "sampling": {"max_new_tokens": 16, "ignore_eos": True},
        "engine": {"type": "torch"},
        "reward": {"type": "python", "function": "rehearsal_cases:share_of_digits"},
        "staleness": {"max_staleness": 1},
        "trainer": {"optimizer": {"learning_rate": 3e-3, "clip": ARMS[arm]}, "checkpoint": {"every_steps": 1000}},
        "consistency": {"mode": "off"},
    }
    if arm != "healthy":
        made["faults"] = {
            "plant": [{"type": "block_explosion", "start_version": every, "every_steps": every}],
            "seed": seed,
        }
    return made


def rewards(made: dict[str, dict[str, Any]], address: str) -> list[float]:
    """Mean reward of every step of one run.

    Raises:
        RuntimeError: the run failed; with the end of its output.
    """
    runs = Path(made["run"]["dir"])
    runs.mkdir(parents=True)
    empty = runs / "empty.toml"
    empty.touch()
    command = [str(CONCORD), "run", str(empty), *settings(made, address)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    rows = [
        row
        for part in (runs / "run" / "metrics").glob("part-*.parquet")
        for row in parquet.read_table(part).to_pylist()
    ]
    return [row["reward_mean"] for row in sorted(rows, key=lambda row: row["step"])]


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--seeds", type=int, default=5, help="runs an arm, seeds from 0")
    arguments.add_argument("--steps", type=int, default=80, help="length of every run")
    arguments.add_argument(
        "--every", type=int, default=20, help="steps between two explosions; the first is at this step"
    )
    arguments.add_argument("--figure", type=Path, default=None, help="also draw the curves into this SVG file")
    chosen = arguments.parse_args()
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # workers of the cluster import the reward from here
    folder = Path(tempfile.mkdtemp(prefix="concord-layerclip-"))
    curves: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    with cluster(ClusterConfig(), 4, 0):
        import ray

        address = str(ray.get_runtime_context().gcs_address)
        for seed in range(chosen.seeds):
            model = model_of(CASES["healthy"], seed, folder / "models")
            for arm in ARMS:
                begun = time.monotonic()
                curves[arm].append(
                    rewards(document(arm, seed, chosen.steps, chosen.every, model, folder / f"{arm}-{seed}"), address)
                )
                area, wall_s = statistics.fmean(curves[arm][-1]), round(time.monotonic() - begun, 1)
                print(json.dumps({"arm": arm, "seed": seed, "area": area, "wall_s": wall_s}), flush=True)
    found = table(curves)
    if chosen.figure:
        chosen.figure.write_text(drawn(found["curves"], chosen.every))
    report({"seeds": chosen.seeds, "steps": chosen.steps, "every": chosen.every, **found}, chosen)


if __name__ == "__main__":
    main()
