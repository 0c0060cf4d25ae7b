"""How many dispatches are where, kept as each one moves; the tables remain the authority and can be counted anew at any
time."""

import sqlite3
from collections import Counter
from typing import NamedTuple

from rollout.types.dispatch import Counts, DispatchState


class Slot(NamedTuple):
    """A place that a dispatch is counted in. The second and third field are set only where they tell places apart."""

    state: DispatchState
    step_version: int | None = None
    """leased: the step that trained it, which no checkpoint holds yet."""
    reason: str | None = None
    """rejected and failed: the reason."""


class Tally:
    """The number of dispatches in each slot."""

    def __init__(self, slots: dict[Slot, int]) -> None:
        self._slots = Counter(slots)

    def move(self, old: Slot | None, new: Slot) -> None:
        """One dispatch goes from `old` (None: it is new) to `new`."""
        if old is not None:
            self._slots[old] -= 1
            if not self._slots[old]:
                del self._slots[old]
        self._slots[new] += 1

    def counts(self) -> Counts:
        at = self._slots

        def by_reason(state: DispatchState) -> tuple[tuple[str, int], ...]:
            return tuple(sorted((slot.reason or "", n) for slot, n in at.items() if slot.state is state))

        held = sorted(
            (slot.step_version, n)
            for slot, n in at.items()
            if slot.state is DispatchState.LEASED and slot.step_version is not None
        )
        return Counts(
            total=at.total(),
            dispatched=at[Slot(DispatchState.DISPATCHED)],
            ready=at[Slot(DispatchState.READY)],
            audited=at[Slot(DispatchState.AUDITED)],
            leased=at[Slot(DispatchState.LEASED)],
            trained_held=tuple(held),
            trained=at[Slot(DispatchState.TRAINED)],
            rejected=by_reason(DispatchState.REJECTED),
            failed=by_reason(DispatchState.FAILED),
        )


def count_slots(connection: sqlite3.Connection) -> dict[Slot, int]:
    """The tables' own count."""
    sql = (
        "SELECT state, CASE state WHEN 'leased' THEN step_version END AS step, reason, count(*) FROM dispatches GROUP "
        "BY state, step, reason"
    )
    return {Slot(DispatchState(state), step, reason): count for state, step, reason, count in connection.execute(sql)}
