"""Bringing finished work home: one loop per episode worker.

Consumes what a worker has finished; produces ready headers, or ends dispatches; a worker that dies is replaced and its
dispatches fail.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from actors.ports import Fleet, WorkerPort
from orchestrator.config import DeadlinesConfig
from orchestrator.dispatch.admission import Admission
from orchestrator.dispatch.book import Book
from orchestrator.replicas.replicas import Replicas
from rollout.episodes.worker import Outcome
from rollout.errors import ProcessLostError
from rollout.tasks import within
from rollout.types.dispatch import Ending, FailReason, RejectReason
from rollout.types.trajectory import GroupHeader


class Collection:
    """The collection loops of all episode workers."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        replicas: Replicas,
        book: Book,
        admission: Admission,
        deadlines: DeadlinesConfig,
        max_attempts: int,
        check_engines: Callable[[], Awaitable[None]],
    ) -> None:
        """`check_engines` is awaited when an engine failed a group, before its capacity comes back: a dead replica must
        get no more work until the next health check."""
        self._fleet = fleet
        self._replicas = replicas
        self._book = book
        self._admission = admission
        self._deadlines = deadlines
        self._max_attempts = max_attempts
        self._check_engines = check_engines
        self.restarts = 0

    async def run(self, index: int) -> None:
        """Collect from worker `index` for ever, replacing it when it dies; ends by cancellation."""
        while True:
            limit_s, key = self._deadlines.trainer_start_s, "deadlines.trainer_start_s"
            worker = await within(self._fleet.new_worker(index), limit_s, key, f"episode worker {index} to start")
            try:
                await self._replicas.attach(worker)
                self._admission.joins(index, worker)
                while True:
                    await self._take(await worker.collect())
            except ProcessLostError as error:
                await self._replace(index, worker, str(error))

    async def _replace(self, index: int, worker: WorkerPort, detail: str) -> None:
        self._admission.leaves(index, worker)
        self._replicas.detach(worker)
        self.restarts += 1
        await worker.kill()
        await self._book.store.record_event("worker_lost", {"worker": index, "detail": detail})
        lost = partial(Ending, reason=FailReason.WORKER, detail=detail)
        await self._book.end(
            [
                lost(dispatch_id=dispatch.dispatch_id, readmit=dispatch.attempt < self._max_attempts)
                for dispatch in self._book.of_worker(index)
            ]
        )

    async def _take(self, outcomes: Sequence[Outcome]) -> None:
        tainted = self._book.finish(o for o in outcomes if isinstance(o, GroupHeader))
        if tainted:
            detail = "sampled by a replica whose weights failed verification"
            await self._book.reject(tainted, RejectReason.CANARY, detail)
        endings = [o for o in outcomes if isinstance(o, Ending)]
        if any(e.reason is FailReason.ENGINE for e in endings):
            await self._check_engines()
        if endings:
            await self._book.end(endings)
        if outcomes:
            self._book.ring()
