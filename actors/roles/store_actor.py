"""The trajectory store in an actor of its own, and its stand-in for everyone else."""

from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray

from actors.calls import call
from actors.places import Place, here
from actors.process import enter_process
from rollout.config import StoreConfig
from rollout.errors import ConcordError
from rollout.store.sqlite.store import SqliteStore
from rollout.types.dispatch import Counts, Dispatch, Ending, LedgerEntry, Readmitted, StepCommit
from rollout.types.prompts import PromptCursor
from rollout.types.protocols import Recovery
from rollout.types.trajectory import Annotation, EncodedGroup, StoredGroups
from rollout.types.weights import PolicyVersion

T = TypeVar("T")


@ray.remote
class StoreActor:
    """Serves one `SqliteStore`, a call after the other. Not asynchronous: the store never waits, and such an actor
    costs less a call."""

    def __init__(self, run_dir: Path, config: StoreConfig) -> None:
        enter_process("store", run_dir)
        self._store = SqliteStore(run_dir, config.durability)

    def place(self) -> Place:
        return here()

    def recover(self, checkpoint: PolicyVersion | None) -> Recovery:
        return _now(self._store.recover(checkpoint))

    def dispatch(self, trainer_epoch: int, dispatches: Sequence[Dispatch], cursor: PromptCursor) -> Counts:
        return _now(self._store.dispatch(trainer_epoch, dispatches, cursor))

    def put(self, groups: Sequence[EncodedGroup]) -> tuple[str, ...]:
        return _now(self._store.put(groups))

    def annotate(self, annotations: Sequence[Annotation]) -> None:
        _now(self._store.annotate(annotations))

    def fetch(self, dispatch_ids: Sequence[str]) -> StoredGroups:
        return _now(self._store.fetch(dispatch_ids))

    def lease(self, trainer_epoch: int, dispatch_ids: Sequence[str]) -> StoredGroups:
        return _now(self._store.lease(trainer_epoch, dispatch_ids))

    def acknowledge(self, commit: StepCommit) -> Counts:
        return _now(self._store.acknowledge(commit))

    def settle(self, checkpoint: PolicyVersion) -> Counts:
        return _now(self._store.settle(checkpoint))

    def reject(self, trainer_epoch: int, endings: Sequence[Ending]) -> Readmitted:
        return _now(self._store.reject(trainer_epoch, endings))

    def commit_version(self, entry: LedgerEntry) -> Counts:
        return _now(self._store.commit_version(entry))

    def record_event(self, kind: str, fields: dict[str, str | int | float | bool | None]) -> None:
        _now(self._store.record_event(kind, fields))

    def counts(self) -> Counts:
        return _now(self._store.counts())

    def close(self) -> None:
        _now(self._store.close())


def _now(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise ConcordError("the store waited for something; a store behind an actor must not")


class RemoteStore:
    """Implements `rollout.types.protocols.Store` over a `StoreActor`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def recover(self, checkpoint: PolicyVersion | None) -> Recovery:
        return await call(self.handle.recover.remote(checkpoint), "the store")

    async def dispatch(self, trainer_epoch: int, dispatches: Sequence[Dispatch], cursor: PromptCursor) -> Counts:
        return await call(self.handle.dispatch.remote(trainer_epoch, dispatches, cursor), "the store")

    async def put(self, groups: Sequence[EncodedGroup]) -> tuple[str, ...]:
        return await call(self.handle.put.remote(groups), "the store")

    async def annotate(self, annotations: Sequence[Annotation]) -> None:
        await call(self.handle.annotate.remote(annotations), "the store")

    async def fetch(self, dispatch_ids: Sequence[str]) -> StoredGroups:
        return await call(self.handle.fetch.remote(dispatch_ids), "the store")

    async def lease(self, trainer_epoch: int, dispatch_ids: Sequence[str]) -> StoredGroups:
        return await call(self.handle.lease.remote(trainer_epoch, dispatch_ids), "the store")

    async def acknowledge(self, commit: StepCommit) -> Counts:
        return await call(self.handle.acknowledge.remote(commit), "the store")

    async def settle(self, checkpoint: PolicyVersion) -> Counts:
        return await call(self.handle.settle.remote(checkpoint), "the store")

    async def reject(self, trainer_epoch: int, endings: Sequence[Ending]) -> Readmitted:
        return await call(self.handle.reject.remote(trainer_epoch, endings), "the store")

    async def commit_version(self, entry: LedgerEntry) -> Counts:
        return await call(self.handle.commit_version.remote(entry), "the store")

    async def record_event(self, kind: str, fields: dict[str, str | int | float | bool | None]) -> None:
        await call(self.handle.record_event.remote(kind, fields), "the store")

    async def counts(self) -> Counts:
        return await call(self.handle.counts.remote(), "the store")

    async def close(self) -> None:
        await call(self.handle.close.remote(), "the store")
