"""Does the doctor name what was planted? A table of planted faults and primary findings, by `concord run` on one warm
Ray cluster and `concord doctor --json`.

Every case of `doctor_cases` runs once a seed: the primary finding must lie in the right layer, and be the right cause.
A healthy run must give nothing worse than info. `--only reward_flip` runs one case, `--healthy 10` so many healthy runs
instead of one a seed.
"""

import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import rehearsal_cases
from harness.doctor_cases import CASES as OWN
from harness.doctor_cases import Case, document
from harness.runs import CONCORD, parser, report
from rehearsal import TIMEOUT_S, settings

from actors.cluster import cluster
from actors.config import ClusterConfig
from orchestrator.metrics.causes import Cause

_NAMES = {"failed(engine)": Cause.ENGINE_FAILURES, "unknown": Cause.UNKNOWN_GAP}
CASES: dict[str, Case] = {
    **OWN,
    **{
        name: Case(cause=_NAMES.get(case.causes[0]) or Cause(case.causes[0]))
        for name, case in rehearsal_cases.CASES.items()
        if case.causes
    },
}
"""By name; those that `doctor_cases` does not make, `rehearsal_cases` makes."""


def made(name: str, seed: int, models: Path, runs: Path) -> dict[str, dict[str, Any]]:
    """The config of a case's run."""
    if name in OWN:
        return document(OWN[name], seed, models, runs)
    case = rehearsal_cases.CASES[name]
    return rehearsal_cases.document(case, seed, rehearsal_cases.model_of(case, seed, models), runs)


def rehearse(name: str, case: Case, seed: int, config: dict[str, dict[str, Any]], address: str) -> dict[str, Any]:
    """One run, and what the doctor says of it. A run that its fault ends with an error is examined all the same."""
    runs, begun = Path(config["run"]["dir"]), time.monotonic()
    empty = runs / "empty.toml"
    empty.touch()
    done = subprocess.run(
        [str(CONCORD), "run", str(empty), *settings(config, address)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    answer = subprocess.run(
        [str(CONCORD), "doctor", str(runs / "run"), "--json"], capture_output=True, text=True, timeout=60.0, check=False
    )
    if answer.returncode:
        told = (
            f"the run ended with {done.returncode}: {done.stderr[-1500:]}; the doctor with {answer.returncode}: "
            f"{answer.stderr[-500:]}"
        )
        return {
            "case": name,
            "seed": seed,
            "expected": case.cause,
            "primary": None,
            "layer": None,
            "right": False,
            "right_layer": False,
            "problem": told,
        }
    found = json.loads(answer.stdout)
    return {
        "case": name,
        "seed": seed,
        "expected": None if case.cause is None else case.cause.value,
        "primary": found["primary"],
        "layer": found["diagnosis_layer"],
        "right": found["primary"] == (None if case.cause is None else case.cause.value),
        "right_layer": found["diagnosis_layer"] == case.layer,
        "others": [finding["cause"] for finding in found["findings"] if finding["cause"] != found["primary"]],
        "summary": found["findings"][0]["summary"] if found["findings"] else "",
        "run_ended_with": done.returncode,
        "wall_s": round(time.monotonic() - begun, 1),
    }


def table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts by case and primary finding, and the shares of the goals."""
    matrix: dict[str, Counter[str]] = {}
    for row in rows:
        matrix.setdefault(row["case"], Counter())[row["primary"] or "nothing"] += 1
    faulty = [row for row in rows if row["case"] != "healthy"]
    healthy = [row for row in rows if row["case"] == "healthy"]
    return {
        "matrix": {case: dict(counts) for case, counts in matrix.items()},
        "runs": len(faulty),
        "right_layer_share": sum(row["right_layer"] for row in faulty) / len(faulty) if faulty else None,
        "right_cause_share": sum(row["right"] for row in faulty) / len(faulty) if faulty else None,
        "healthy_runs": len(healthy),
        "healthy_with_a_finding": sum(not row["right"] for row in healthy),
    }


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--seeds", type=int, default=5, help="runs a case")
    arguments.add_argument("--first-seed", type=int, default=0, help="the first of the seeds")
    arguments.add_argument("--healthy", type=int, default=None, help="healthy runs; default: as many as seeds")
    arguments.add_argument(
        "--only", action="append", metavar="CASE", choices=sorted(CASES), help="run this case only; may come again"
    )
    chosen = arguments.parse_args()
    names = [name for name in CASES if name in (chosen.only or CASES)]
    seeds = {
        name: chosen.healthy if name == "healthy" and chosen.healthy is not None else chosen.seeds for name in names
    }
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)  # workers of the cluster import the reward from here
    folder = Path(tempfile.mkdtemp(prefix="concord-doctor-"))
    rows: list[dict[str, Any]] = []
    with cluster(ClusterConfig(), 4, 0):
        import ray

        address = str(ray.get_runtime_context().gcs_address)
        for turn in range(max(seeds.values())):
            seed = chosen.first_seed + turn
            for name in (name for name in names if turn < seeds[name]):
                runs = folder / f"{len(rows)}"
                runs.mkdir()
                rows.append(rehearse(name, CASES[name], seed, made(name, seed, folder / "models", runs), address))
                print(json.dumps(rows[-1]), flush=True)
    report({**table(rows), "rows": rows}, chosen)


if __name__ == "__main__":
    main()
