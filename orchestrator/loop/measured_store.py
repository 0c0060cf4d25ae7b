"""The store as the driver sees it: every call under one deadline, and with the seconds from the call to its answer,
which are those of actor, disk and the driver's own event loop together."""

import time
from collections.abc import Callable

from rollout.tasks import within
from rollout.types.protocols import EventFields, Store

OBSERVED = frozenset({"dispatch", "acknowledge", "reject", "commit_version", "record_event"})
"""Calls that the loop makes while it runs, whose seconds are a metric."""


class MeasuredStore(Store):
    """Hands everything on to `store`."""

    def __init__(
        self,
        store: Store,
        *,
        deadline_s: float,
        observe: Callable[[str, float], None],
        on_event: Callable[[str, EventFields], None],
    ) -> None:
        """Wrap `store`.

        Args:
            store: who answers.
            deadline_s: `deadlines.store_s`; a call without an answer by then raises DeadlineError.
            observe: called with (call, seconds) after each call in OBSERVED, answered or not.
            on_event: called with every run event before the store has it.
        """
        super().__init__(self._send)
        self._store, self._deadline_s, self._observe, self._on_event = store, deadline_s, observe, on_event

    async def _send(self, name: str, *args: object) -> object:
        begun = time.perf_counter()
        try:
            answer = self._store.send(name, *args)
            return await within(answer, self._deadline_s, "deadlines.store_s", f"the store to answer {name}")
        finally:
            if name in OBSERVED:
                self._observe(name, time.perf_counter() - begun)

    async def record_event(self, kind: str, fields: EventFields) -> None:
        self._on_event(kind, fields)
        await super().record_event(kind, fields)
