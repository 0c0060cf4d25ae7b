"""Replicas are watched: one that is not well is given up, and what it sampled wrongly is rejected."""

import asyncio

from orchestrator.dispatch.book import Book
from orchestrator.observers import Observer, ReplicaFailure
from orchestrator.weight_sync.lifecycle import ReplicaLifecycle
from rollout.types.dispatch import RejectReason


class Supervision(Observer):
    """Watches the health of engine replicas."""

    def __init__(self, lifecycle: ReplicaLifecycle, book: Book, interval_s: float) -> None:
        self._lifecycle, self._book, self._interval_s = lifecycle, book, interval_s

    async def run(self) -> None:
        """Check replicas for ever; ends by cancellation."""
        while True:
            await self._lifecycle.check()
            await asyncio.sleep(self._interval_s)

    async def replica_failed(self, failure: ReplicaFailure) -> None:
        """Reject the ready groups that it sampled under a policy that it was never verified for."""
        tainted = [header for header in self._book.pool.ready.values() if self._book.is_tainted(header)]
        await self._book.reject(tainted, RejectReason.CANARY, failure.reason)

    def replica_serves(self, slot: int) -> None:
        """It may get work."""
        self._book.ring()
