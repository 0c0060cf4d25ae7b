"""The doctor inside the loop: the rules of `orchestrator.doctor` over rows and events, every few steps, in a task of
its own.

Consumes metric rows and run events; produces `concord_diagnosis` and `concord_diagnosis_primary`, and an event when the
primary finding changes. It never touches the training.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from heapq import merge
from operator import itemgetter

from orchestrator.doctor.diagnosis import Diagnosis, diagnose
from orchestrator.doctor.evaluations import lines
from orchestrator.doctor.findings import Finding
from orchestrator.metrics.blocks import BlockValue
from orchestrator.metrics.causes import Learning
from orchestrator.metrics.layers import LAYERS
from orchestrator.metrics.system import NO_CAUSE, PRIMARY_CAUSES
from orchestrator.observers import Observer
from orchestrator.run_dir.history import History
from orchestrator.run_dir.record import RunEvent, record_of_rows
from rollout.errors import ConcordError, boundary
from rollout.types.dispatch import Counts
from rollout.types.protocols import EventFields

EVERY_STEPS = 10
"""Steps between two diagnoses."""
MAX_ROWS = 500
"""Newest rows that are kept."""
FIRST_ROWS = 50
"""Oldest rows that are kept for good: rules compare with the start."""
NEAR_STEPS = 10
"""Rows this near to where a finding, or the newest line of evaluations, began are kept as long as it stands."""
MAX_EVENTS = 500
"""Newest events of each kind that are kept: a frequent kind displaces no rare one."""
OF_INTEREST = frozenset(
    (
        *(
            "evaluation",
            "prompts_checked",
            "step_skipped",
            "gradloc",
            "consistency_finding",
            "consistency_drift",
            "consistency_baseline",
            "trainer_disagrees",
            "update_differs",
            "sampler_differs",
            "samples_repeat",
            "routing_incomplete",
        ),
        *("replica_failed", "replica_start_failed", "worker_lost", "auditor_lost", "no_step", "groups_failing"),
    )
)
"""Kinds of events that rules read, or that call for a look."""
AT_ONCE = frozenset(("no_step", "groups_failing"))
"""Kinds after which it looks without waiting for steps: none may come."""
Row = tuple[Mapping[str, float], Mapping[str, float]]
"""A row, and the dispatches ended until then."""


class LiveDoctor(Observer):
    """The doctor of one loop. It sees what happened since the loop began; `concord doctor` sees the whole run."""

    def __init__(
        self, record_event: Callable[[str, EventFields], Awaitable[None]], history: Callable[[], History] = History
    ) -> None:
        """`history` answers with what became of dispatches until now."""
        self._record_event, self._history = record_event, history
        self._first: list[Row] = []
        self._marked: list[Row] = []
        self._newest: deque[Row] = deque()
        self._marks: set[int] = set()
        self._blocks: dict[tuple[str, str], dict[int, float]] = {}
        self._events: dict[str, deque[tuple[int, RunEvent]]] = {}
        self._num_events = 0
        self._bell = asyncio.Event()
        self._primary: Finding | None = None
        self._broken = False
        self.diagnosis: Diagnosis | None = None
        """The newest; None before the first."""

    def numbers(self) -> dict[str, dict[tuple[str, ...], float]]:
        """The newest diagnosis by metric and label values; nothing once the rules have failed, since what they said is
        old then."""
        if self._broken:
            return {}
        primary = None if self.diagnosis is None else self.diagnosis.primary
        cause = NO_CAUSE if primary is None else primary.cause.value
        learning = Learning.OPEN if self.diagnosis is None else self.diagnosis.learning
        return {
            "concord_diagnosis": {
                (str(layer),): 0.0 if self.diagnosis is None else float(self.diagnosis.worst_rank(layer))
                for layer in LAYERS
            },
            "concord_diagnosis_primary": {(each,): float(each == cause) for each in PRIMARY_CAUSES},
            "concord_learning_state": {(each.value,): float(each is learning) for each in Learning},
        }

    def event_recorded(self, kind: str, fields: EventFields) -> None:
        """A run event is being recorded."""
        if kind in OF_INTEREST:
            step = int(self._newest[-1][0]["step"]) if self._newest else 0
            self._num_events += 1
            of_kind = self._events.setdefault(kind, deque(maxlen=MAX_EVENTS))
            of_kind.append((self._num_events, RunEvent(kind=kind, step=step, fields=dict(fields))))
        if kind in AT_ONCE:
            self._bell.set()

    def step(self, row: Mapping[str, float], counts: Counts, blocks: list[BlockValue]) -> None:
        """A step ended."""
        step = int(row["step"])
        tally = {
            f"{end}:{reason}": float(n)
            for end, each in (("failed", counts.failed), ("rejected", counts.rejected))
            for reason, n in each
        }
        self._newest.append((row, tally))
        if len(self._newest) > MAX_ROWS:
            self._let_go(self._newest.popleft())
        for one in blocks:
            if one.head is None:
                values = self._blocks.setdefault((one.signal, one.block), {})
                values[step] = one.value
                if len(values) > MAX_ROWS:
                    values.pop(next(iter(values)))
        if step % EVERY_STEPS == 0:
            self._bell.set()

    def _let_go(self, old: Row) -> None:
        """A row leaves the newest ones."""
        if len(self._first) < FIRST_ROWS:
            self._first.append(old)
        elif self._is_marked(old):
            self._marked.append(old)

    def _is_marked(self, row: Row) -> bool:
        return any(abs(row[0]["step"] - mark) <= NEAR_STEPS for mark in self._marks)

    async def run(self) -> None:
        """Diagnose for ever; ends by cancellation."""
        while not self._broken:
            await self._bell.wait()
            await self.look()

    async def look(self) -> None:
        """Diagnose now, and tell a primary finding that is another than before. Trouble here is reported once, and
        never ends the training."""
        self._bell.clear()
        if self._broken:
            return
        try:
            with boundary(ConcordError, "diagnosing"):
                events = [event for _, event in merge(*self._events.values(), key=itemgetter(0))]
                rows = (*self._first, *self._marked, *self._newest)
                record = record_of_rows(
                    [row for row, _ in rows],
                    tallies=[tally for _, tally in rows],
                    events=events,
                    blocks=self._blocks,
                    history=self._history(),
                )
                self.diagnosis = diagnose(record)
                self._marks = {finding.since for finding in self.diagnosis.findings} | {
                    line.steps[0] for line in lines(record)[-1:]
                }
                self._marked = [row for row in self._marked if self._is_marked(row)]
        except ConcordError as error:
            self._broken = True
            await self._record_event("doctor_failed", {"reason": str(error)})
            return
        before, self._primary = self._primary, self.diagnosis.primary
        if (before is None) != (self._primary is None) or (
            before is not None and self._primary is not None and before.cause != self._primary.cause
        ):
            await self._record_event("diagnosis", {**_told(self._primary), "step": self.diagnosis.last_step})


def _told(primary: Finding | None) -> dict[str, str | int | float | bool | None]:
    if primary is None:
        return {"cause": None, "diagnosis_layer": 0, "severity": None, "summary": "nothing worse than info"}
    return {
        "cause": primary.cause.value,
        "diagnosis_layer": primary.layer,
        "severity": primary.severity.value,
        "summary": primary.summary,
    }
