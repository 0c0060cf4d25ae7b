"""The driver's book of dispatches: what runs, what is ready, what comes again. A mirror of the store, which stays the
authority.

All loops share one book on one event loop; every change of it that other loops may wait for rings their bells.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from orchestrator.deadlines import Progress
from orchestrator.dispatch.accounts import Accounts
from orchestrator.dispatch.failures import failures_of
from orchestrator.dispatch.staleness import Pool
from orchestrator.observers import Observer, Observers
from orchestrator.replicas.replicas import Replicas
from orchestrator.run_dir.side_files import SideFiles
from rollout.types.dispatch import Counts, Dispatch, Ending, Readmission, RejectReason
from rollout.types.prompts import PromptCursor
from rollout.types.protocols import Recovery, Store
from rollout.types.trajectory import GroupHeader
from rollout.types.weights import ApplyReport, PolicyVersion


class Book(Observer):
    """Dispatches between their durable record and their end."""

    def __init__(
        self,
        *,
        store: Store,
        replicas: Replicas,
        recovery: Recovery,
        accounts: Accounts,
        progress: Progress,
        observers: Observers,
    ) -> None:
        self.store = store
        self.epoch = recovery.trainer_epoch
        self.cursor: PromptCursor = recovery.cursor
        self.readmissions: deque[Readmission] = deque(recovery.readmissions)
        self.counts: Counts = recovery.counts
        self.pool = Pool()
        self.pool.finish(recovery.ready)
        self.accounts = accounts
        self.side_files = SideFiles(store.record_event)
        self.progress = progress
        self.admit_bell = asyncio.Event()
        self.train_bell = asyncio.Event()
        self.idle = asyncio.Event()
        """Set while nothing runs and nothing may start (deterministic publications wait for it)."""
        self._replicas = replicas
        self._observers = observers
        self._next_dispatch = recovery.next_dispatch
        self._incarnations: dict[str, int] = {}
        self._workers: dict[str, int] = {}
        self._trained: dict[int, int] = {}

    def trained(self, version: int, groups: int) -> None:
        """Step `version` trained on so many groups."""
        self._trained[version] = groups

    def trained_after(self, committed_version: int) -> int:
        """Groups of steps whose version the ledger has not committed yet."""
        self._trained = {version: groups for version, groups in self._trained.items() if version > committed_version}
        return sum(self._trained.values())

    def recounts(self, counts: Counts) -> None:
        """Where the store says that all dispatches are."""
        self.counts = counts

    async def until_idle(self) -> None:
        """Return when nothing runs and nothing may start under the committed version (deterministic publications)."""
        self.idle.clear()
        self.admit_bell.set()
        await self.progress.until(self.idle, "publication", "the last groups of the version before")

    def version_committed(self, policy: PolicyVersion, reports: Sequence[ApplyReport]) -> None:
        """Capacity may have come back, and held groups may be trained on."""
        self.ring()

    def ring(self) -> None:
        """Something changed that a loop may wait for."""
        self.admit_bell.set()
        self.train_bell.set()

    def next_id(self) -> str:
        """A dispatch id never used before; ids sort in dispatch order."""
        dispatch_id = f"d{self._next_dispatch:08d}"
        self._next_dispatch += 1
        return dispatch_id

    async def open(self, dispatches: Sequence[Dispatch], cursor: PromptCursor, workers: Sequence[int]) -> None:
        """Record dispatches durably; `workers[i]` runs `dispatches[i]`."""
        for dispatch, worker in zip(dispatches, workers, strict=True):
            replica = self._replicas[dispatch.replica]
            replica.takes_group()
            self._incarnations[dispatch.dispatch_id] = replica.incarnation
            self._workers[dispatch.dispatch_id] = worker
        self.counts = await self.store.dispatch(self.epoch, dispatches, cursor)
        self.cursor = cursor
        self.pool.start(dispatches)
        self.accounts.start(dispatches)
        self._observers.dispatches_begun(len(dispatches))

    def finish(self, headers: Iterable[GroupHeader]) -> list[GroupHeader]:
        """Groups came back durable; answers with those that hold tokens of a replica that failed verification."""
        ours = [header for header in headers if header.dispatch_id in self.pool.running]
        known = [replace(header, incarnation=self._incarnations[header.dispatch_id]) for header in ours]
        for header in known:
            self._release(self.pool.running[header.dispatch_id])
            self.accounts.finish(header)
        self.pool.finish(known)
        self._observers.episodes_over(len(known), ())
        tainted = [header for header in known if self.is_tainted(header)]
        self._observers.groups_ready([header for header in known if header not in tainted])
        return tainted

    def is_tainted(self, header: GroupHeader) -> bool:
        """Whether a replica that failed verification may have sampled tokens of this group under the failed policy."""
        return self._replicas.is_tainted(header.replica, header.incarnation, header.policies)

    def unverified(self) -> set[str]:
        """Ready groups with tokens of a policy that their replica was asked to take and is not verified for: not yet,
        or never (they are about to be rejected)."""
        taking = {(r.slot, r.incarnation): r.applying for r in self._replicas if r.applying is not None}
        return {
            header.dispatch_id
            for header in self.pool.ready.values()
            if taking.get((header.replica, header.incarnation)) in header.policies or self.is_tainted(header)
        }

    def of_worker(self, index: int) -> list[Dispatch]:
        return [d for d in self.pool.running.values() if self._workers.get(d.dispatch_id) == index]

    async def end(self, endings: Sequence[Ending]) -> None:
        """End dispatches without training; capacity comes back, and prompts where the ending says so. Ids that are
        unknown here have ended before."""
        live = [e for e in endings if e.dispatch_id in self.pool.running or e.dispatch_id in self.pool.ready]
        if not live:
            return
        if failed := failures_of(live):
            self._observers.episodes_over(0, failed)
        for ending in live:
            if ending.dispatch_id in self.pool.running:
                self._release(self.pool.running[ending.dispatch_id])
                self.accounts.end(ending.dispatch_id)
        self.leave(e.dispatch_id for e in live)
        await self._reject(live)

    async def reject(self, headers: Iterable[GroupHeader], reason: RejectReason, detail: str) -> None:
        """End ready groups; their prompts come again."""
        await self.end([Ending(dispatch_id=h.dispatch_id, reason=reason, detail=detail, readmit=True) for h in headers])

    async def end_leased(self, endings: Sequence[Ending]) -> None:
        """End groups that the trainer had taken and did not train on."""
        if endings:
            await self._reject(endings)

    def leave(self, dispatch_ids: Iterable[str]) -> None:
        """Dispatches ended or went to the trainer: forget them."""
        for dispatch_id in dispatch_ids:
            self.pool.drop((dispatch_id,))
            self._incarnations.pop(dispatch_id, None)
            self._workers.pop(dispatch_id, None)

    async def _reject(self, endings: Sequence[Ending]) -> None:
        answer = await self.store.reject(self.epoch, endings)
        self.counts = answer.counts
        self.readmissions.extend(answer.readmissions)
        self.ring()

    def _release(self, dispatch: Dispatch) -> None:
        self._replicas[dispatch.replica].gives_back(self._incarnations[dispatch.dispatch_id])
