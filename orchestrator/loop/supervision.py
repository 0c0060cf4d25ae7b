"""Replicas are watched and replaced: a failing one is killed, its tainted groups are rejected, and a new incarnation
starts."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from orchestrator.config import DeadlinesConfig
from orchestrator.dispatch.book import Book
from orchestrator.replicas.replicas import Replica, Replicas
from orchestrator.weight_sync.publication import Publisher
from rollout.errors import ConcordError
from rollout.types.dispatch import RejectReason
from rollout.types.weights import PolicyVersion

MAX_FAILED_STARTS = 3
"""Starts of one slot in a row that may fail before the run ends with the reason."""


class Supervision:
    """Owns the restarts of engine replicas."""

    def __init__(
        self,
        *,
        replicas: Replicas,
        book: Book,
        deadlines: DeadlinesConfig,
        spawn: Callable[[Coroutine[None, None, None], str], object],
    ) -> None:
        self._replicas = replicas
        self._book = book
        self._deadlines = deadlines
        self._spawn = spawn
        self.publisher: Publisher | None = None
        self.on_tainted: Callable[[Replica, PolicyVersion, str], Awaitable[None]] | None = None
        """Told of a replica that did not take over this policy."""
        self.on_serving: Callable[[], None] = lambda: None
        """Told when a new incarnation serves."""
        self.restarts = 0

    async def run(self) -> None:
        """Check replicas for ever; ends by cancellation."""
        while True:
            await self.check()
            await asyncio.sleep(self._deadlines.health_interval_s)

    async def check(self) -> None:
        """Ask every live replica once how it is, and retire those that are not well."""
        await self._replicas.poll(self.fail)

    async def fail(self, replica: Replica, reason: str, suspects: tuple[PolicyVersion, ...] = ()) -> None:
        """Retire the replica's incarnation for `reason` and begin a new one."""
        self.restarts += 1
        if suspects and self.on_tainted is not None:
            await self.on_tainted(replica, suspects[-1], reason)
        await self._replicas.retire(replica, suspects)
        await self._book.store.record_event(
            "replica_failed", {"replica": replica.slot, "incarnation": replica.incarnation, "reason": reason}
        )
        tainted = [h for h in self._book.pool.ready.values() if self._book.is_tainted(h)]
        await self._book.reject(tainted, RejectReason.CANARY, reason)
        self._spawn(self._restart(replica), f"restart of replica {replica.slot}")

    async def _restart(self, replica: Replica) -> None:
        if self.publisher is None:
            raise ConcordError("supervision was started without a publisher")
        for attempt in range(1, MAX_FAILED_STARTS + 1):
            try:
                await self.publisher.restart(replica)
            except ConcordError as error:
                await self._replicas.retire(replica)
                await self._book.store.record_event(
                    "replica_start_failed", {"replica": replica.slot, "attempt": attempt, "reason": str(error)}
                )
                if attempt == MAX_FAILED_STARTS:
                    raise
                continue
            await self._book.store.record_event(
                "replica_restarted",
                {
                    "replica": replica.slot,
                    "incarnation": replica.incarnation,
                    "policy": self.publisher.committed.policy.key,
                },
            )
            self._book.ring()
            self.on_serving()
            return
