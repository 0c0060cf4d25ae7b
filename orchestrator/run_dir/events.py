"""`events.jsonl` read on from where the last look ended: events of the run with their place, how many dispatches had
ended so by then, and the history of all of them.

A line that is being written waits for the next look; one that is no event is counted, and the rest is read.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from orchestrator.run_dir.history import History, HistoryBuilder
from orchestrator.run_dir.lineage import Lineage
from orchestrator.run_dir.record import RunEvent
from rollout.store.sqlite.database import RESERVED_FIELDS
from rollout.store.sqlite.journal import EventKind
from rollout.types.weights import PolicyVersion

OF_ONE_DISPATCH: frozenset[str] = frozenset(EventKind) - {
    EventKind.EPOCH_OPENED,
    EventKind.STEP_COMMITTED,
    EventKind.STEP_TAKEN_BACK,
    EventKind.VERSION_COMMITTED,
    EventKind.VERSION_ORPHANED,
}
"""Kinds that no rule reads and no page draws one by one."""
ENDED: frozenset[str] = frozenset((EventKind.FAILED, EventKind.REJECTED))
"""Those of them that are counted by their reason."""
OF_A_STEP = frozenset(("evaluation", "step_skipped", "gradloc"))
"""Kinds about one version: they count while its step does."""
_HEAD = re.compile(rb'^\{"number":\s*(\d+),\s*"at_s":\s*([-+.\deE]+),\s*"kind":\s*"([^"]*)"')
"""The beginning of a line: of most lines nothing else is read."""


class EventLog:
    """One file; `read` takes what is new."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._number = 0
        self._at_s = 0.0
        self._epoch = 0
        self._events: list[tuple[int, RunEvent]] = []
        self._counts: Counter[str] = Counter()
        self._counts_at: dict[int, Mapping[str, float]] = {}
        self._broken: list[int] = []
        self._history, self._step_at_s = HistoryBuilder(), 0.0
        self.version = 0
        """The trainer's, after the newest step that was committed."""
        self.resumed: dict[int, int] = {}
        """Trainer epoch -> version from which it went on."""

    def read(self) -> None:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                begin, self._offset = self._offset, self._offset + len(line)
                head = _HEAD.match(line)
                kind = "" if head is None else head.group(3).decode(errors="replace")
                if head is not None and kind in OF_ONE_DISPATCH - ENDED:
                    self._count(int(head.group(1)), float(head.group(2)), kind)
                    continue
                try:
                    self._take(cast("dict[str, Any]", json.loads(line)))
                except (ValueError, KeyError, TypeError):
                    self._broken.append(begin)

    def _count(self, number: int, at_s: float, kind: str) -> None:
        """An event of one dispatch that did not end it."""
        if number <= self._number:
            return
        self._number, self._at_s = number, at_s
        if kind == EventKind.DISPATCHED:
            self._history.begun()
        elif kind == EventKind.READY:
            self._history.came_back()

    def _take(self, event: Mapping[str, Any]) -> None:
        number, at_s, kind = int(event["number"]), float(event["at_s"]), str(event["kind"])
        if number <= self._number:
            return  # after a crash the export repeats lines
        if kind == EventKind.STEP_COMMITTED:
            self.version = PolicyVersion.parse(str(event["policy"])).version
            self._counts_at[self.version] = dict(self._counts)
            self._step_at_s = at_s
        elif kind == EventKind.EPOCH_OPENED:
            self._epoch, self.version = int(event["trainer_epoch"]), int(event["resumed_version"])
            self.resumed[self._epoch] = self.version
            self._step_at_s = at_s
        elif kind in ENDED:
            self._counts[f"{kind}:{event.get('reason')}"] += 1
            if kind == EventKind.FAILED:
                self._history.failed(str(event.get("reason")), str(event.get("detail", "")), self.version)
        self._number, self._at_s = number, at_s
        if kind not in OF_ONE_DISPATCH:
            own = {key: value for key, value in event.items() if key not in RESERVED_FIELDS}
            fields = {key: value for key, value in own.items() if isinstance(value, str | int | float | None)}
            self._events.append((self._epoch, RunEvent(kind=kind, step=self.version, at_s=at_s, fields=fields)))

    def all(self, lineage: Lineage) -> list[RunEvent]:
        """Events in the order of their numbers, each once; what is about a step that a resume took back is left out."""
        return [event for epoch, event in self._events if event.kind not in OF_A_STEP or _counts(lineage, epoch, event)]

    @property
    def at_s(self) -> float:
        """Unix time of the newest event, by the store's clock; 0 before the first."""
        return self._at_s

    def history(self) -> History:
        """What became of all dispatches; how the run ended is not for this file to say."""
        since_s = self._at_s - self._step_at_s if self._step_at_s else 0.0
        counted, starts = self._history.history(), tuple(self.resumed.values())
        return replace(counted, version=self.version, starts=starts, since_step_s=since_s)

    def newest(self) -> str:
        """When the newest event happened, in words; nothing before the first."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._at_s))
        return f", and its newest event is of {at}" if self._at_s else ""

    def tally_at(self, step: int) -> Mapping[str, float]:
        """Dispatches that had ended by the end of `step`, by `failed:REASON` and `rejected:REASON`."""
        return dict(self._counts) if step > self.version else self._counts_at.get(step, {})

    def notes(self) -> list[str]:
        """What could not be read."""
        if not self._path.is_file():
            return [
                f"{self._path.name} is missing: failures, evaluations, versions and findings of the consistency service"
                " are not seen"
            ]
        if not self._broken:
            return []
        lines, are = ("1 line", "is") if len(self._broken) == 1 else (f"{len(self._broken)} lines", "are")
        first = self._broken[0]
        return [f"{lines} of {self._path.name} cannot be read and {are} left out (the first at byte {first})"]


def _counts(lineage: Lineage, epoch: int, event: RunEvent) -> bool:
    version = event.fields.get("version", event.fields.get("step"))
    return not isinstance(version, int) or lineage.counts(epoch, version)
