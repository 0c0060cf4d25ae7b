"""What became of a run's dispatches, and how the run itself stands: the part of a run's record that is no step.

`HistoryBuilder` counts as things happen, fed by `events.jsonl` or by a live loop; `History` is what it has counted,
typed, for rules and pages. It knows no file and no loop.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rollout.errors import place_in
from rollout.types.dispatch import Counts

MOST_KINDS = 50
"""Kinds of failure that are told apart; what comes after them is counted by its reason alone."""
_NAMED = re.compile(r"\S*\d\S*")
"""What differs from one failure to the next of its kind: ids, numbers, paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureKind:
    """Dispatches that failed alike: for one reason, at one place of the user's code (or, without a place, in the same
    words)."""

    reason: str
    """A `FailReason`."""
    place: str
    """`FILE:LINE in FUNCTION`; empty where no line of the user's is known."""
    detail: str
    """What the newest of them said."""
    count: int = 0
    first_step: int = 0
    """The trainer's version at the first of them."""
    last_step: int = 0
    """The same at the newest."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class How(StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    """It made all its steps."""
    STOPPED = "stopped"
    """Somebody asked it to end after its step."""
    INTERRUPTED = "interrupted"
    """A signal ended it at once."""
    FAILURES = "failures"
    """Too many dispatches failed: `episodes.max_failures_in_a_row` or `episodes.max_failure_share`."""
    STALLED = "stalled"
    """No step finished for `deadlines.stall_s`."""
    ERROR = "error"
    """Something else that it cannot go on without."""
    LOST = "lost"
    """Its driver is gone, and did not say why: it was killed, or its machine is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """The end of a run."""

    how: How
    reason: str = ""
    """In words; empty where the run ended as it was asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Everything that happened to a run's dispatches until now, those after its newest row included."""

    dispatched: int = 0
    came_back: int = 0
    """Dispatches whose episode ended with a group."""
    failed: Mapping[str, int] = field(default_factory=dict[str, int])
    """Dispatches that ended without a group, by `FailReason`."""
    version: int = 0
    """The trainer's, as far as events tell."""
    in_a_row: int = 0
    """Failures since the newest group came back."""
    kinds: tuple[FailureKind, ...] = ()
    """The most frequent first."""
    starts: tuple[int, ...] = ()
    """The version from which each start of the trainer went on; the first is the run's own."""
    since_step_s: float = 0.0
    """From the newest step (or the start of the trainer) to the newest event, by the store's own clock."""
    end: RunEnd | None = None
    """How the run ended; None while it goes on."""

    @property
    def over(self) -> int:
        """Dispatches whose episodes are over, one way or the other."""
        return self.came_back + sum(self.failed.values())

    def most_frequent(self, reasons: tuple[str, ...] = (), since: int = 0) -> FailureKind | None:
        """The kind of most failures: of these reasons (of any, without), seen at version `since` or later."""
        found = [k for k in self.kinds if (not reasons or k.reason in reasons) and k.last_step >= since]
        return max(found, key=lambda kind: kind.count, default=None)


def history_of(counts: Counts) -> History:
    """What the store's counts say."""
    failed = dict(counts.failed)
    over = counts.total - counts.dispatched
    return History(dispatched=counts.total, came_back=over - sum(failed.values()), failed=failed)


class HistoryBuilder:
    """Counts. Memory is bounded by the number of kinds."""

    def __init__(self, before: History | None = None) -> None:
        """`before` was counted by another; of the kinds of its failures nothing is known."""
        before = before or History()
        self._dispatched, self._came_back, self._in_a_row = before.dispatched, before.came_back, 0
        self._failed: Counter[str] = Counter(before.failed)
        self._kinds: dict[tuple[str, str], FailureKind] = {}

    def begun(self, count: int = 1) -> None:
        """So many dispatches were recorded."""
        self._dispatched += count

    def came_back(self, count: int = 1) -> None:
        """So many groups became durable."""
        self._came_back += count
        self._in_a_row = 0 if count else self._in_a_row

    def failed(self, reason: str, detail: str, step: int) -> None:
        """A dispatch ended without a group, while the trainer was at version `step`."""
        self._failed[reason] += 1
        self._in_a_row += 1
        place = place_in(detail)
        key = (reason, place or _NAMED.sub("#", detail))
        if key not in self._kinds and len(self._kinds) >= MOST_KINDS:
            key = (reason, "")
        known = self._kinds.get(key) or FailureKind(reason=reason, place=place, detail=detail, first_step=step)
        self._kinds[key] = replace(known, detail=detail, count=known.count + 1, last_step=step)

    @property
    def in_a_row(self) -> int:
        """Failures since the newest group came back."""
        return self._in_a_row

    def history(self) -> History:
        """What was counted until now."""
        return History(
            dispatched=self._dispatched,
            came_back=self._came_back,
            failed=dict(self._failed),
            in_a_row=self._in_a_row,
            kinds=tuple(sorted(self._kinds.values(), key=lambda kind: -kind.count)),
        )
