"""Does the doctor name what was planted, and keep quiet where nothing was? Real training of the tiny model in one
process (`little.runs`), a table of planted kinds and primary findings.

Every kind of `little.cases` runs once a seed. `--only "reward flipped"` runs one kind, `--healthy` the healthy runs of
unusual settings as well, `--part 1/4` the first of four shares of the kinds, `--records DIR` keeps what the doctor saw
and reads it back instead of training where it is there.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness.runs import parser, report

from little.cases import HEALTHY, KINDS, LittleCase
from little.runs import Little
from little.trace import Trace
from orchestrator.doctor.diagnosis import Diagnosis, diagnose
from trainer.config.trainer import TinyModelConfig
from trainer.tiny.tiny import build_tiny, default_cache_dir


def trace_of(name: str, case: LittleCase, seed: int, records: Path | None) -> Trace:
    """What one run leaves, from the disk where it was kept."""
    if case.seen is not None:
        return trace_of("plain", LittleCase(causes=()), seed, records).planted(case.seen)
    kept = None if records is None else records / f"{name.replace(' ', '_').replace('%', 'pc')}-{seed}.json"
    if kept is not None and kept.exists():
        return Trace.read(kept)
    directory = build_tiny(TinyModelConfig(moe=case.setting.moe), default_cache_dir())
    trace = Little(case.setting, case.fault, seed, directory).train(directory)
    if kept is not None:
        trace.write(kept)
    return trace


def rehearse(name: str, case: LittleCase, seed: int, records: Path | None) -> dict[str, Any]:
    """One run, and what the doctor says of it."""
    begun = time.monotonic()
    record = trace_of(name, case, seed, records).record()
    return {
        "case": name,
        "seed": seed,
        "steps": len(record),
        **verdict(case, diagnose(record)),
        "wall_s": round(time.monotonic() - begun, 1),
    }


def verdict(case: LittleCase, found: Diagnosis) -> dict[str, Any]:
    """Whether the primary finding is one of those that are right."""
    primary = found.primary
    return {
        "expected": [cause.value for cause in case.causes],
        "primary": None if primary is None else primary.cause.value,
        "right": (primary is None) if not case.causes else primary is not None and primary.cause in case.causes,
        "right_layer": (primary is None) if not case.causes else primary is not None and primary.layer in case.layers,
        "findings": [f"{finding.cause}:{finding.severity}:{finding.since}" for finding in found.findings],
        "summary": found.findings[0].summary if found.findings else "",
    }


def table(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts by kind and primary finding, and the shares of the goals."""
    matrix: dict[str, Counter[str]] = {}
    for row in rows:
        matrix.setdefault(row["case"], Counter())[row["primary"] or "nothing"] += 1
    faulty, healthy = ([row for row in rows if bool(row["expected"]) is planted] for planted in (True, False))
    return {
        "matrix": {case: dict(counts) for case, counts in matrix.items()},
        "kinds": len({row["case"] for row in faulty}),
        "runs": len(faulty),
        "right_layer_share": _share(faulty, "right_layer"),
        "right_cause_share": _share(faulty, "right"),
        "silent": sum(row["primary"] is None for row in faulty),
        "healthy_steps": sum(row["steps"] for row in healthy),
        "healthy_with_a_finding": sum(not row["right"] for row in healthy),
    }


def _share(rows: Sequence[dict[str, Any]], what: str) -> float | None:
    return round(sum(row[what] for row in rows) / len(rows), 4) if rows else None


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--seeds", type=int, default=3, help="runs a kind")
    arguments.add_argument("--first-seed", type=int, default=0, help="the first of the seeds")
    arguments.add_argument("--healthy", action="store_true", help="the healthy runs too, once each")
    arguments.add_argument("--part", default="1/1", help="which share of the kinds, as 1/4")
    arguments.add_argument("--records", type=Path, default=None, help="where what the doctor saw is kept")
    arguments.add_argument("--only", action="append", metavar="KIND", choices=sorted({**KINDS, **HEALTHY}))
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    part, parts = (int(number) for number in chosen.part.split("/"))
    wanted = {**KINDS, **(HEALTHY if chosen.healthy or chosen.only else {})}
    names = [name for name in wanted if name in (chosen.only or wanted)][part - 1 :: parts]
    rows: list[dict[str, Any]] = []
    for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
        for name in (each for each in names if each in KINDS or seed == chosen.first_seed):
            rows.append(rehearse(name, wanted[name], seed, chosen.records))
            print(json.dumps(rows[-1]), flush=True)
    report({**table(rows), "rows": rows}, chosen)


if __name__ == "__main__":
    main()
