"""From a manifest to a committed version: the only edge of the loop that goes back.

Consumes manifests from the training loop; has every live replica apply and verify them; commits the ledger when all
healthy replicas have answered; retires and restarts those that fail. Waits for engines. With weights on disk it never
makes the trainer wait; what travels from GPU to GPU must not change on its way, so the trainer then waits for
`transferred`. Publications are serial. A waiting manifest is superseded by a newer one, except in deterministic mode,
where every version is applied in turn after the engines have drained.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager

from orchestrator.replicas.replicas import Replica, Replicas
from orchestrator.weight_sync.transfer import Transfer
from rollout.errors import ConcordError, WeightSyncError
from rollout.types.dispatch import LedgerEntry
from rollout.types.generation import PauseMode
from rollout.types.protocols import Store
from rollout.types.weights import ApplyReport, PolicyVersion, WeightManifest

MAX_TRIES = 3
"""How often a publication is tried while all replicas that take it die of it."""


class Publisher:
    """Owns the committed policy of the run."""

    def __init__(
        self,
        *,
        replicas: Replicas,
        store: Store,
        first: WeightManifest,
        mode: PauseMode,
        on_commit: Callable[[list[ApplyReport]], Awaitable[None]],
        on_failure: Callable[[Replica, str, tuple[PolicyVersion, ...]], Awaitable[None]],
        transfer: Transfer | None = None,
    ) -> None:
        self._replicas = replicas
        self._store = store
        self._mode = mode
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._transfer = transfer
        self._settled = asyncio.Event()
        self._waiting: deque[WeightManifest] = deque()
        self._offered = asyncio.Event()
        self._joined = asyncio.Event()
        self._held: Counter[PolicyVersion] = Counter()
        self._weights_lock = asyncio.Lock()
        self.committed = first
        """The manifest that new incarnations start on."""
        self.superseded = 0
        self.ready_to_apply: Callable[[], Awaitable[None]] | None = None
        """Awaited before each update. Deterministic mode: until nothing runs and nothing may start; with evaluations:
        until version 0 is scored."""

    def offer(self, manifest: WeightManifest) -> None:
        """A newer policy is on disk."""
        if self._mode is not PauseMode.DRAIN:
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
                if self.ready_to_apply is not None:
                    await self.ready_to_apply()
                await self._a_replica_serves()
                manifest = self._waiting.popleft()
                with self._hold(manifest.policy):
                    await self._publish(manifest)
            self._settled.set()

    async def _a_replica_serves(self) -> None:
        while not self._replicas.serving(self.committed.policy):
            self._joined.clear()
            await self._joined.wait()

    async def _publish(self, manifest: WeightManifest) -> None:
        """Bring every live replica to `manifest`. Replicas that die of it come back; the manifest is then tried again,
        unless a newer one waits."""
        failures: list[ConcordError] = []
        for _ in range(MAX_TRIES):
            async with self._weights_lock:
                live = self._replicas.serving(self.committed.policy)
                answers = await self._update_all(live, manifest)
                reports = [answer for answer in answers if isinstance(answer, ApplyReport)]
                if reports:
                    await self._store.commit_version(LedgerEntry(policy=manifest.policy, digest=manifest.digest))
                    self.committed = manifest
            if reports:
                await self._on_commit(reports)
                return
            failures = [answer for answer in answers if isinstance(answer, ConcordError)]
            if any(isinstance(failure, WeightSyncError) for failure in failures):
                break
            await self._a_replica_serves()
            if self._waiting and self._mode is not PauseMode.DRAIN:
                return
        raise WeightSyncError(
            f"no engine replica took over {manifest.policy.key}: {'; '.join(map(str, failures)) or 'none is alive'}"
        )

    async def _update_all(self, live: Sequence[Replica], manifest: WeightManifest) -> list[ApplyReport | ConcordError]:
        """The answer of each replica; with a GPU transport the trainer sends meanwhile.

        Raises:
            WeightSyncError: the trainer could not send: whoever waited for the rest can only be ended.
        """
        if self._transfer is None or not live:
            return await asyncio.gather(*(self._update(replica, manifest) for replica in live))
        announced = await self._transfer.announce(manifest, live)
        updates = asyncio.gather(*(self._update(replica, announced) for replica in live))
        try:
            await self._transfer.send(announced)
            return await updates
        finally:
            updates.cancel()

    async def _update(self, replica: Replica, manifest: WeightManifest) -> ApplyReport | ConcordError:
        incarnation = replica.incarnation
        try:
            return await self._replicas.update(replica, manifest, self._mode)
        except ConcordError as error:
            if replica.incarnation == incarnation and replica.port is not None:
                await self._on_failure(replica, str(error), (manifest.policy,))
            return error

    async def restart(self, replica: Replica) -> None:
        """Start a new incarnation of a retired slot on the committed weights, and catch up with what was committed
        meanwhile."""
        first = self.committed
        with self._hold(first.policy):
            await self._replicas.start(replica, first)
        async with self._weights_lock:
            if replica.applied != self.committed.policy:
                await self._replicas.update(replica, self.committed, self._mode)
        self._joined.set()

    @contextmanager
    def _hold(self, policy: PolicyVersion) -> Generator[None]:
        """Keep the weights of `policy` on disk while a replica reads them."""
        self._held += Counter((policy,))
        try:
            yield
        finally:
            self._held -= Counter((policy,))

    @property
    def num_waiting(self) -> int:
        """Versions that no engine has been asked to take yet."""
        return len(self._waiting)

    def held(self) -> set[PolicyVersion]:
        """Policies whose published weights a replica may still ask for."""
        return {self.committed.policy, *(m.policy for m in self._waiting), *self._held}
