"""The store as the driver sees it, with the seconds from each call to its answer: actor, disk and the driver's own
event loop together."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from rollout.types.dispatch import Counts, Dispatch, Ending, LedgerEntry, Readmitted, StepCommit
from rollout.types.prompts import PromptCursor
from rollout.types.protocols import Recovery, Store
from rollout.types.trajectory import Annotation, EncodedGroup, StoredGroups
from rollout.types.weights import PolicyVersion

T = TypeVar("T")


class MeasuredStore:
    """Hands everything on to `store`; `observe` is told (call, seconds) of those calls that the loop makes while it
    runs."""

    def __init__(
        self,
        store: Store,
        *,
        deadline_s: float,
        observe: Callable[[str, float], None],
        on_event: Callable[[str, dict[str, str | int | float | bool | None]], None],
    ) -> None:
        self._store, self._deadline_s, self._observe, self._on_event = store, deadline_s, observe, on_event

    async def _timed(self, call: str, answer: Awaitable[T]) -> T:
        begun = time.perf_counter()
        try:
            return await answer
        finally:
            self._observe(call, time.perf_counter() - begun)

    async def recover(self, checkpoint: PolicyVersion | None) -> Recovery:
        return await self._store.recover(checkpoint)

    async def dispatch(self, trainer_epoch: int, dispatches: Sequence[Dispatch], cursor: PromptCursor) -> Counts:
        return await self._timed("dispatch", self._store.dispatch(trainer_epoch, dispatches, cursor))

    async def put(self, groups: Sequence[EncodedGroup]) -> tuple[str, ...]:
        return await self._store.put(groups)

    async def annotate(self, annotations: Sequence[Annotation]) -> None:
        await self._store.annotate(annotations)

    async def fetch(self, dispatch_ids: Sequence[str]) -> StoredGroups:
        return await self._store.fetch(dispatch_ids)

    async def lease(self, trainer_epoch: int, dispatch_ids: Sequence[str]) -> StoredGroups:
        return await self._store.lease(trainer_epoch, dispatch_ids)

    async def acknowledge(self, commit: StepCommit) -> Counts:
        return await self._timed("acknowledge", self._store.acknowledge(commit))

    async def settle(self, checkpoint: PolicyVersion) -> Counts:
        return await self._store.settle(checkpoint)

    async def reject(self, trainer_epoch: int, endings: Sequence[Ending]) -> Readmitted:
        return await self._timed("reject", self._store.reject(trainer_epoch, endings))

    async def commit_version(self, entry: LedgerEntry) -> Counts:
        return await self._timed("commit_version", self._store.commit_version(entry))

    async def record_event(self, kind: str, fields: dict[str, str | int | float | bool | None]) -> None:
        self._on_event(kind, fields)
        await self._timed("record_event", self._store.record_event(kind, fields))

    async def counts(self) -> Counts:
        return await self._store.counts()

    async def close(self) -> None:
        await self._store.close()
