"""What a little run leaves: rows, tallies, events and values of blocks, before they are a record. What only the loop
reports (times, failures, events, scores) can be planted into it afterwards, as if it had happened in that very run."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path

from orchestrator.run_dir.record import Record, RunEvent, record_of_rows


@dataclass(slots=True)
class Trace:
    """A run up to step `step`."""

    rows: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    tallies: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    events: list[RunEvent] = field(default_factory=list[RunEvent])
    blocks: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict[tuple[str, str], dict[int, float]])
    step: int = 0
    tally: dict[str, float] = field(default_factory=dict[str, float])
    """Dispatches ended until now, by `failed:REASON` and `rejected:REASON`."""

    def record(self) -> Record:
        """As the doctor sees it."""
        return record_of_rows(self.rows, tallies=self.tallies, events=self.events, blocks=self.blocks)

    def write(self, path: Path) -> None:
        """Keep it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        events = [{"kind": one.kind, "step": one.step, "fields": dict(one.fields)} for one in self.events]
        blocks = [[*key, list(values.items())] for key, values in self.blocks.items()]
        path.write_text(json.dumps({"rows": self.rows, "tallies": self.tallies, "events": events, "blocks": blocks}))

    @staticmethod
    def read(path: Path) -> "Trace":
        """The inverse of `write`."""
        kept = json.loads(path.read_text())
        return Trace(
            rows=kept["rows"],
            tallies=kept["tallies"],
            events=[RunEvent(**event) for event in kept["events"]],
            blocks={(signal, block): dict(values) for signal, block, values in kept["blocks"]},
        )

    def planted(self, seen: "Seen") -> "Trace":
        """The same run, of which the loop reports something else."""
        other = Trace(
            rows=deepcopy(self.rows),
            events=[seen.rescored(one) if one.kind == "evaluation" else one for one in self.events],
            blocks=self.blocks,
        )
        for row in other.rows:
            other.step = int(row["step"])
            seen.row(other, row)
            other.tallies.append(dict(other.tally))
        return other


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the loop reports otherwise; nothing by default."""

    row: Callable[[Trace, dict[str, float]], None] = lambda trace, row: None
    """Changes the row of the step that has just ended, its tally and the events."""
    evaluated: Callable[[int, float], tuple[float, str]] | None = None
    """Score and fingerprint of the evaluation of a version."""

    def rescored(self, event: RunEvent) -> RunEvent:
        """The event of an evaluation, with another score and fingerprint."""
        if self.evaluated is None:
            return event
        score, fingerprint = self.evaluated(event.step, event.number("score"))
        return replace(event, fields={**event.fields, "score": score, "fingerprint": fingerprint})
