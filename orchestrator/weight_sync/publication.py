"""From a manifest to a committed version: the only edge of the loop that goes back.

Consumes manifests from the training loop; has every serving replica apply and verify them; commits the ledger when
those that answered suffice. A straggler does not hold the version of the others back: it gets no work until it has
caught up. Waits for engines. With weights on disk it never makes the trainer wait; what travels from GPU to GPU must
not change on its way, so the trainer then waits for `transferred`. Publications are serial. A waiting manifest is
superseded by a newer one, except in deterministic mode, where every version is applied in turn after the engines have
drained.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from orchestrator.observers import Observers
from orchestrator.replicas.replica import Replica
from orchestrator.replicas.replicas import Replicas
from orchestrator.weight_sync.committed import CommittedWeights
from orchestrator.weight_sync.lifecycle import ReplicaLifecycle
from orchestrator.weight_sync.transfer import Transfer
from rollout.errors import ConcordError, WeightSyncError
from rollout.types.dispatch import LedgerEntry
from rollout.types.protocols import Store
from rollout.types.weights import ApplyReport, PolicyVersion, WeightManifest

MAX_TRIES = 3
"""How often a publication is tried while all replicas that take it die of it."""

Answer = ApplyReport | ConcordError


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationRules:
    """When a version may be committed."""

    every_version: bool
    """Deterministic mode: no version is superseded, and all replicas must answer."""
    quorum: int
    """Replicas that must have answered before a version is committed without its stragglers."""
    straggler_s: float
    """A replica that has not answered by then is a straggler."""


class Publisher:
    """Owns the publications of a run."""

    def __init__(
        self,
        *,
        replicas: Replicas,
        lifecycle: ReplicaLifecycle,
        weights: CommittedWeights,
        store: Store,
        rules: PublicationRules,
        observers: Observers,
        transfer: Transfer | None = None,
        gates: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        """`gates` are awaited before each update, in their order."""
        self._replicas, self._lifecycle, self._weights, self._store = replicas, lifecycle, weights, store
        self._rules, self._observers, self._transfer, self._gates = rules, observers, transfer, gates
        self._settled = asyncio.Event()
        self._waiting: deque[WeightManifest] = deque()
        self._offered = asyncio.Event()
        self.superseded = 0
        self.stragglers = 0
        """How often a version was committed without a replica that had not answered in time."""

    @property
    def committed(self) -> WeightManifest:
        return self._weights.manifest

    def offer(self, manifest: WeightManifest) -> None:
        if not self._rules.every_version:
            self.superseded += len(self._waiting)
            self._waiting.clear()
        self._waiting.append(manifest)
        self._settled.clear()
        self._offered.set()

    async def transferred(self) -> None:
        """With a GPU transport: wait until no replica takes bytes from the trainer any more. With disk none does:
        returns at once."""
        if self._transfer is not None:
            await self._settled.wait()

    async def run(self) -> None:
        """Publish for ever; ends by cancellation, or by raising when no replica passes."""
        while True:
            await self._offered.wait()
            self._offered.clear()
            while self._waiting:
                for gate in self._gates:
                    await gate()
                await self._lifecycle.a_replica_serves()
                manifest = self._waiting.popleft()
                with self._weights.hold(manifest.policy):
                    await self._publish(manifest)
            self._settled.set()

    async def _publish(self, manifest: WeightManifest) -> None:
        """Bring every serving replica to `manifest`. Replicas that die of it come back; the manifest is then tried
        again, unless a newer one waits."""
        answers: list[Answer] = []
        for _ in range(MAX_TRIES):
            serving = self._replicas.serving(self._weights.policy)
            answers = await self._update_all(serving, manifest)
            reports = [answer for answer in answers if isinstance(answer, ApplyReport)]
            if reports:
                for replica in serving:  # first: a resume must know of them
                    if replica.applying == manifest.policy:
                        self.stragglers += 1
                        fields = {"replica": replica.slot, "policy": manifest.policy.key}
                        await self._store.record_event("replica_straggles", {**fields})
                await self._store.commit_version(LedgerEntry(policy=manifest.policy, digest=manifest.digest))
                self._weights.move_to(manifest)
                self._lifecycle.committed()
                self._observers.version_committed(manifest.policy, reports)
                return
            if any(isinstance(answer, WeightSyncError) for answer in answers):
                break
            await self._lifecycle.a_replica_serves()
            if self._waiting and not self._rules.every_version:
                return
        raise WeightSyncError(
            f"no engine replica took over {manifest.policy.key}: {'; '.join(map(str, answers)) or 'none is alive'}"
        )

    async def _update_all(self, serving: Sequence[Replica], manifest: WeightManifest) -> list[Answer]:
        """What the replicas answered; with a GPU transport the trainer sends meanwhile, and nobody can be left behind.

        Raises:
            WeightSyncError: the trainer could not send: whoever waited for the rest can only be ended.
        """
        if self._transfer is None or not serving:
            return await self._until_enough([self._lifecycle.update(replica, manifest) for replica in serving])
        announced = await self._transfer.announce(manifest, serving)
        updates = [self._lifecycle.update(replica, announced) for replica in serving]
        try:
            await self._transfer.send(announced)
            return [await update for update in updates]
        finally:
            for update in updates:
                update.cancel()

    async def _until_enough(self, updates: Sequence[asyncio.Task[Answer]]) -> list[Answer]:
        """Answers of all replicas, or of a quorum once the others are stragglers: these go on by themselves."""
        if not updates:
            return []
        limit_s = None if self._rules.every_version else self._rules.straggler_s
        done, pending = await asyncio.wait(updates, timeout=limit_s)
        while pending and sum(isinstance(update.result(), ApplyReport) for update in done) < self._rules.quorum:
            more, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        return [update.result() for update in done]

    @property
    def num_waiting(self) -> int:
        """Versions that no engine has been asked to take yet."""
        return len(self._waiting)

    def in_use(self) -> set[PolicyVersion]:
        """Policies whose published weights a replica may still ask for."""
        return {*self._weights.in_use(), *(manifest.policy for manifest in self._waiting)}
