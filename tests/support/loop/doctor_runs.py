"""Runs as the doctor sees them, made up: healthy ones with the noise of a real run, and what goes wrong in them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchestrator.metrics.catalogue import COLUMNS
from orchestrator.run_dir.history import History, How, RunEnd
from orchestrator.run_dir.record import Record, RunEvent, record_of_rows

ETERNAL = "f" * 64
"""Fingerprint of the evaluations of one configuration."""


@dataclass
class MadeUpRun:
    """Rows, tallies and events; a scenario changes them before `record`."""

    rows: list[dict[str, float]]
    events: list[RunEvent] = field(default_factory=list[RunEvent])
    tallies: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    blocks: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict[tuple[str, str], dict[int, float]])
    history: History | None = None

    def set(self, name: str, value: Callable[[float], float], since: int = 0) -> None:
        """Change a column from a row on: `value` of the share of the run that is over."""
        for index, row in enumerate(self.rows):
            if index >= since:
                row[name] = value(index / max(1, len(self.rows) - 1))

    def event(self, kind: str, at: int, /, **fields: object) -> None:
        """When `at` was the trainer's version."""
        self.events.append(RunEvent(kind=kind, step=at, fields=fields))

    def ended(self, how: How, reason: str = "", **fields: Any) -> None:
        """It has ended so."""
        self.history = History(end=RunEnd(how=how, reason=reason), **fields)

    def end(self, kind: str, per_step: float, since: int = 0) -> None:
        """So many dispatches a step end as `failed:REASON` or `rejected:REASON`."""
        for index, tally in enumerate(self.tallies):
            tally[kind] = per_step * max(0, index - since + 1)

    def record(self) -> Record:
        return record_of_rows(
            self.rows, tallies=self.tallies, events=self.events, blocks=self.blocks, history=self.history
        )


def healthy(seed: int, steps: int = 120) -> MadeUpRun:
    """The quickstart: reward .45 -> .95, entropy falls, solved groups rise, KL small; evaluated every ten steps on 64
    prompts."""
    random = np.random.default_rng(seed)
    rows: list[dict[str, float]] = []
    events: list[RunEvent] = []
    for step in range(1, steps + 1):
        progress = step / steps
        accuracy = 0.45 + 0.5 * progress
        p = float(np.clip(accuracy + random.normal(0, 0.03), 0, 1))
        solved, wrong = p**8, (1 - p) ** 8
        row = dict.fromkeys(COLUMNS, 0.0)
        row |= {
            "step": step,
            "trainer_epoch": 1,
            "reward_mean": p,
            "reward_std": float(np.sqrt(p * (1 - p))),
            "length_mean": 3.9 + random.normal(0, 0.05),
            "zero_variance_groups": solved + wrong,
            "all_correct_groups": solved,
            "all_wrong_groups": wrong,
            "distinct_prompts": 1.0,
            "reward_length_correlation": random.normal(-0.1, 0.08),
            "policy_entropy": 0.8 * (1 - 0.8 * progress) + random.normal(0, 0.02),
            "approx_kl": abs(random.normal(2e-3, 1e-3)),
            "learning_rate": 3e-4,
            "loss": random.normal(0, 0.05),
            "grad_norm": float(random.lognormal(-0.7, 0.4)),
            "max_attention_logit": -1.0,
            "dispatched": 16 * (step + 2),
            "replica_slowness": float(random.lognormal(0.1, 0.1)),
            "slowest_replica": 1.0,
        }
        rows.append(row)
        if step % 10 == 0:
            score = float(random.binomial(64, min(1.0, 0.55 + 0.42 * progress))) / 64
            error = float(np.sqrt(score * (1 - score) / 64))
            fields = {
                "score": score,
                "stderr": error,
                "version": step,
                "fingerprint": ETERNAL,
                "part_chat_template": "a",
            }
            events.append(RunEvent(kind="evaluation", step=step, fields=fields))
    return MadeUpRun(rows, events, [{} for _ in rows])


def rescore(run: MadeUpRun, score: Callable[[float], float]) -> None:
    """Other evaluation scores: of the share of the run that is over."""
    last = max(int(row["step"]) for row in run.rows)

    def changed(event: RunEvent) -> RunEvent:
        fields: Mapping[str, object] = {**event.fields, "score": score(event.step / last), "stderr": 0.06}
        return RunEvent(kind=event.kind, step=event.step, fields=fields)

    run.events = [changed(event) if event.kind == "evaluation" else event for event in run.events]
