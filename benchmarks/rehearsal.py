"""Does a run find what was planted into it? A matrix of planted faults and what was found first, by `concord run` on
one warm Ray cluster.

Every case of `rehearsal_cases` runs once a seed: the right cause must come first, explain at least 80 % of the gap, on
the right replica, within two versions of the start of the fault. A healthy run of 200 steps must find nothing. `--only
"stale_head"` runs one case; `--engine vllm --seeds 1` takes the real engine, without the cases that need its routing.
"""

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from harness.rehearsal_cases import CASES, REPLICA, START, Case, document, findings, model_of, problem, read_events
from harness.runs import CONCORD, parser, report

from actors.cluster import cluster
from actors.config import ClusterConfig

TIMEOUT_S = 900.0
ENGINES: dict[str, dict[str, object]] = {
    "torch": {"num_cpus": 0},
    "vllm": {"num_cpus": 0, "kv_cache_gib": 0.25, "max_model_len": 256, "enforce_eager": True},
}
"""Engine keys by type. Nothing asks Ray for CPUs: one run at a time has the machine."""


def settings(made: dict[str, dict[str, Any]], address: str) -> list[str]:
    """`--set` for every key of a config document, on the warm cluster."""
    made["engine"] |= ENGINES[made["engine"]["type"]]
    for section in ("trainer", "consistency"):
        made[section]["num_cpus"] = 0
    made["cluster"] = {"address": address}
    return [f"--set={section}.{key}={toml(value)}" for section, keys in made.items() for key, value in keys.items()]


def toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in cast("dict[str, object]", value).items()) + "}"
    return (
        "[" + ", ".join(map(toml, cast("list[object]", value))) + "]" if isinstance(value, list) else json.dumps(value)
    )


def rehearse(name: str, case: Case, seed: int, made: dict[str, dict[str, Any]], address: str) -> dict[str, object]:
    """One run, and what it found. A replica that never passes its canary again ends its run with an error; its events
    tell all the same."""
    runs, begun = Path(made["run"]["dir"]), time.monotonic()
    empty = runs / "empty.toml"
    empty.touch()
    command = [str(CONCORD), "run", str(empty), *settings(made, address)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    events = runs / "run" / "events.jsonl"
    found = findings(read_events(events.parent)) if events.exists() else []
    first = asdict(found[0]) if found else None
    if done.returncode and not found:
        return {
            "case": name,
            "seed": seed,
            "problem": f"the run ended with {done.returncode}: {done.stderr[-1500:]}",
            "found": None,
        }
    return {
        "case": name,
        "seed": seed,
        "expected": list(case.causes),
        "found": first,
        "steps_to_find": None if not found or not case.causes else max(0, found[0].version - START),
        "right_replica": None if not found else found[0].replica == REPLICA,
        "findings": len(found),
        "problem": problem(case, found),
        "wall_s": round(time.monotonic() - begun, 1),
    }


def table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts by case and cause, and the shares of the goals over runs with a fault."""
    matrix: dict[str, Counter[str]] = {}
    for row in rows:
        matrix.setdefault(row["case"], Counter())[row["found"]["cause"] if row["found"] else "nothing"] += 1
    faulty = [row for row in rows if row["case"] != "healthy"]
    right = [row for row in faulty if not row["problem"]]
    return {
        "matrix": {case: dict(counts) for case, counts in matrix.items()},
        "runs": len(faulty),
        "right": len(right),
        "right_share": len(right) / len(faulty) if faulty else None,
        "explained_min": min((row["found"]["explained"] for row in right), default=None),
        "steps_to_find_mean": statistics.fmean(row["steps_to_find"] for row in right) if right else None,
        "healthy_findings": sum(row["findings"] for row in rows if row["case"] == "healthy" and "findings" in row),
    }


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--engine", choices=sorted(ENGINES), default="torch", help="the engine of all replicas")
    arguments.add_argument("--seeds", type=int, default=5, help="runs a case")
    arguments.add_argument("--first-seed", type=int, default=0, help="of these runs; the healthy run belongs to seed 0")
    arguments.add_argument(
        "--only", action="append", metavar="CASE", choices=sorted(CASES), help="run this case only; may come again"
    )
    arguments.add_argument(
        "--healthy-steps", type=int, default=200, help="length of the healthy run, which has one seed"
    )
    chosen = arguments.parse_args()
    names = [
        name
        for name in CASES
        if name in (chosen.only or CASES) and not (chosen.engine != "torch" and CASES[name].experts)
    ]
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # workers of the cluster import the reward from here
    folder = Path(tempfile.mkdtemp(prefix="concord-rehearsal-"))
    rows: list[dict[str, Any]] = []
    with cluster(ClusterConfig(), 4, 0):
        import ray

        address = str(ray.get_runtime_context().gcs_address)
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
            for name in (each for each in names if seed == 0 or each != "healthy"):
                runs = folder / f"{len(rows)}"
                runs.mkdir()
                made = document(CASES[name], seed, model_of(CASES[name], seed, folder / "models"), runs, chosen.engine)
                if name == "healthy":
                    made["run"]["steps"] = chosen.healthy_steps
                rows.append(rehearse(name, CASES[name], seed, made, address))
                print(json.dumps(rows[-1]), flush=True)
    report({"engine": chosen.engine, **table(rows), "rows": rows}, chosen)


if __name__ == "__main__":
    main()
