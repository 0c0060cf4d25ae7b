"""How many groups may start, and starting them: the staleness window at its entrance.

Bound: with at most (eta + 1) x batch unfinished groups, and a trained group counted until the ledger commits its step's
version, at most (v + eta + 1) x batch groups were ever dispatched while the ledger stood at v or below. Consumed oldest
first, the group dispatched at v is trained at step v + eta + 1 at the latest, by a trainer at version v + eta:
staleness eta.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial

from actors.ports import WorkerPort
from orchestrator.dispatch.book import Book
from orchestrator.dispatch.failures import FailureWatch
from orchestrator.dispatch.staleness import Window, capacity
from orchestrator.replicas.replica import Replica
from orchestrator.replicas.replicas import Replicas
from orchestrator.weight_sync.committed import CommittedWeights
from rollout.errors import ProcessLostError
from rollout.tasks import within
from rollout.types.dispatch import Dispatch, Ending, FailReason, Readmission
from rollout.types.protocols import PromptSource


class Admission:
    """The loop that turns capacity into durable, running dispatches."""

    def __init__(
        self,
        *,
        book: Book,
        window: Window,
        source: PromptSource,
        weights: CommittedWeights,
        replicas: Replicas,
        failures: FailureWatch,
        group_size: int,
        submit_deadline_s: float,
    ) -> None:
        self._book = book
        self._window = window
        self._source = source
        self._weights = weights
        self._replicas = replicas
        self._failures = failures
        self._group_size = group_size
        self._deadline_s = submit_deadline_s
        self._workers: dict[int, WorkerPort] = {}

    def joins(self, index: int, worker: WorkerPort) -> None:
        """An episode worker may get work; every replica that serves knows it."""
        self._workers[index] = worker
        self._book.ring()

    def leaves(self, index: int, worker: WorkerPort) -> None:
        """This worker is dead: whoever hears first says so, and nothing happens when its successor has joined."""
        if self._workers.get(index) is worker:
            del self._workers[index]

    def capacity(self) -> int:
        """Groups that may start now."""
        book, committed = self._book, self._weights.policy.version
        return capacity(self._window, book.counts, len(book.pool.running), book.trained_after(committed))

    async def run(self) -> None:
        """Admit for ever; ends by cancellation. While all that is admitted fails, it admits after ever longer
        pauses."""
        book = self._book
        while True:
            if self._may_admit():
                await self._failures.pause()
            room, serving = self.capacity(), self._replicas.serving(self._weights.policy)
            if room and serving and self._workers:
                book.idle.clear()
                await self._admit(room, serving, dict(self._workers))
                continue
            missing = "capacity" if not room else "an engine replica" if not serving else "an episode worker"
            what = f"{missing} ({book.counts.in_flight} groups in flight)"
            if not room and not book.pool.running:
                book.idle.set()
            await book.progress.until(book.admit_bell, "admission", what)
            book.admit_bell.clear()

    def _may_admit(self) -> bool:
        return bool(self.capacity() and self._replicas.serving(self._weights.policy) and self._workers)

    async def _admit(self, count: int, serving: Sequence[Replica], workers: Mapping[int, WorkerPort]) -> None:
        book = self._book
        again = [book.readmissions.popleft() for _ in range(min(count, len(book.readmissions)))]
        fresh, cursor = self._source.draw(book.cursor, count - len(again))
        admitted = [*again, *(Readmission(prompt=prompt, attempt=1) for prompt in fresh)]
        slots = spread(admitted, serving)
        policy, now = self._weights.policy, time.time()
        dispatches = [
            Dispatch(
                dispatch_id=book.next_id(),
                prompt=a.prompt,
                group_size=self._group_size,
                attempt=a.attempt,
                policy=policy,
                replica=slot,
                created_at_s=now,
            )
            for a, slot in zip(admitted, slots, strict=True)
        ]
        indices = list(workers)
        await book.open(dispatches, cursor, [indices[i % len(indices)] for i in range(len(dispatches))])
        for position, index in enumerate(indices):
            await self._submit(index, workers[index], dispatches[position :: len(indices)])

    async def _submit(self, index: int, worker: WorkerPort, share: Sequence[Dispatch]) -> None:
        if not share:
            return
        try:
            taking = worker.submit(share)
            await within(taking, self._deadline_s, "deadlines.store_s", "an episode worker to take dispatches")
        except ProcessLostError as error:
            self.leaves(index, worker)  # or the next round would hand the same prompts to it, and so for ever
            ending = partial(Ending, reason=FailReason.WORKER, detail=str(error), readmit=True)
            await self._book.end([ending(dispatch_id=dispatch.dispatch_id) for dispatch in share])


def spread(items: Sequence[object], serving: Sequence[Replica]) -> list[int]:
    """A slot for each item: always the one with the fewest groups assigned."""
    load = {replica.slot: replica.assigned for replica in serving}
    slots: list[int] = []
    for _ in items:
        slot = min(load, key=lambda s: load[s])
        load[slot] += 1
        slots.append(slot)
    return slots
