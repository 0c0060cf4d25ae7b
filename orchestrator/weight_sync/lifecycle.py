"""The life of an engine replica after its first start: updated, given up, started again, brought up to date.

    fail (an incarnation) -> its process ends, observers hear -> the slot starts anew -> catches up -> serves
    a version is committed -> whoever is behind catches up -> serves

A failure names an incarnation: one that is gone already cannot fail again. A slot has one restart at a time. It owns
these tasks; it must never know dispatches, groups or training.
"""

import asyncio
from collections.abc import Sequence

from orchestrator.config import DeadlinesConfig
from orchestrator.observers import Observers, ReplicaFailure
from orchestrator.replicas.replica import Replica
from orchestrator.replicas.replicas import Replicas
from orchestrator.weight_sync.committed import CommittedWeights
from rollout.errors import ConcordError, ProcessLostError, first_error
from rollout.types.generation import PauseMode
from rollout.types.protocols import Store
from rollout.types.weights import ApplyReport, PolicyVersion, WeightManifest

MAX_FAILED_STARTS = 3
"""Starts in a row that a slot may fail while no other replica is there; then the run ends with the reason."""
LONGEST_PAUSE_S = 60.0
"""Between two starts of a slot that does not come up."""


class ReplicaLifecycle:
    """All replicas of a run, from their first start on."""

    def __init__(
        self,
        *,
        replicas: Replicas,
        weights: CommittedWeights,
        store: Store,
        mode: PauseMode,
        deadlines: DeadlinesConfig,
        observers: Observers,
    ) -> None:
        self._replicas, self._weights, self._store, self._mode = replicas, weights, store, mode
        self._deadlines, self._observers = deadlines, observers
        self._group: asyncio.TaskGroup = asyncio.TaskGroup()
        self._ended = asyncio.Event()
        self._catching_up: set[tuple[int, int]] = set()
        self._restarting: set[int] = set()
        self._failed_starts = {replica.slot: 0 for replica in replicas}
        self._joined = asyncio.Event()
        self.restarts = 0

    async def run(self) -> None:
        """Own the tasks for ever; ends by cancellation.

        Raises:
            ConcordError: no replica is left, and none comes up.
        """
        try:
            async with self._group:
                await self._ended.wait()
        except* ConcordError as errors:
            raise first_error(errors) from errors

    async def check(self) -> None:
        """Ask every live replica once how it is, and give up those that are not well."""
        await self._replicas.poll(self.fail)

    async def fail(self, slot: int, incarnation: int, reason: str, suspects: Sequence[PolicyVersion] = ()) -> None:
        """Give up an incarnation for `reason` and start the slot anew; nothing more happens to one that is gone.

        Args:
            suspects: policies that it was to take over and was not verified for: what it sampled under them is tainted.
        """
        replica = self._replicas[slot]
        self._replicas.taint(slot, incarnation, suspects)
        if not replica.is_live(incarnation):
            return
        self.restarts += 1
        policy, gap, tolerance = suspects[-1] if suspects else None, replica.canary_gap_nats, replica.tolerance_nats
        failure = ReplicaFailure(slot, incarnation, reason, policy, gap, tolerance)
        unverified = () if replica.applying is None else (replica.applying,)
        self._replicas.taint(slot, incarnation, unverified)
        await self._replicas.retire(replica)
        if slot not in self._restarting:
            self._restarting.add(slot)
            self._group.create_task(self._restart(replica), name=f"restart of replica {slot}")
        tainted = unverified or tuple(suspects)
        fields = {"replica": slot, "incarnation": incarnation, "reason": reason}
        fields |= {"policy": tainted[-1].key if tainted else None}
        await self._store.record_event("replica_failed", {**fields})
        await self._observers.replica_failed(failure)

    def update(self, replica: Replica, manifest: WeightManifest) -> asyncio.Task[ApplyReport | ConcordError]:
        """Bring a replica to `manifest`, in a task that outlives whoever waits for it. One that fails at it is given
        up."""
        return self._group.create_task(self._update(replica, manifest), name=f"update of replica {replica.slot}")

    async def _update(self, replica: Replica, manifest: WeightManifest) -> ApplyReport | ConcordError:
        incarnation = replica.incarnation
        with self._weights.hold(manifest.policy):
            async with replica.update_lock:
                try:
                    if not replica.is_live(incarnation):
                        raise ProcessLostError(f"{replica.name} has no process; it is being restarted")
                    return await self._replicas.update(replica, manifest, self._mode)
                except ConcordError as error:
                    await self.fail(replica.slot, incarnation, str(error), (manifest.policy,))
                    return error

    def committed(self) -> None:
        """The ledger moved on: bring everybody who is behind up to date."""
        for replica in self._replicas:
            key = (replica.slot, replica.incarnation)
            behind = replica.applied is not None and not replica.serves(self._weights.policy)
            if behind and key not in self._catching_up:
                self._catching_up.add(key)
                self._group.create_task(self._catch_up(replica, key), name=f"catch-up of replica {replica.slot}")

    async def _catch_up(self, replica: Replica, key: tuple[int, int]) -> None:
        """Until the replica serves what is committed; meanwhile it gets no work."""
        try:
            while replica.is_live(key[1]) and not replica.serves(self._weights.policy):
                if replica.update_lock.locked():
                    async with replica.update_lock:  # an update is under way: perhaps that was all it needed
                        continue
                await self._update(replica, self._weights.manifest)
        finally:
            self._catching_up.discard(key)
        if replica.is_live(key[1]) and replica.applied is not None:
            fields = {"replica": replica.slot, "policy": replica.applied.key}
            await self._store.record_event("replica_caught_up", {**fields})
            self._serves(replica)

    def _serves(self, replica: Replica) -> None:
        self._joined.set()
        self._observers.replica_serves(replica.slot)

    async def a_replica_serves(self) -> None:
        """Return when at least one replica serves the committed policy."""
        while not self._replicas.serving(self._weights.policy):
            self._joined.clear()
            await self._joined.wait()

    async def _restart(self, replica: Replica) -> None:
        """Start the slot until it comes up, with growing pauses."""
        while True:
            first = self._weights.manifest
            try:
                with self._weights.hold(first.policy):
                    await self._replicas.start(replica, first)
            except ConcordError as error:
                await self._start_failed(replica, error)
                continue
            self._restarting.discard(replica.slot)
            self._failed_starts[replica.slot] = 0
            fields = {"replica": replica.slot, "incarnation": replica.incarnation, "policy": first.policy.key}
            await self._store.record_event("replica_restarted", {**fields})
            if replica.serves(self._weights.policy):
                self._serves(replica)
            else:
                self.committed()
            return

    async def _start_failed(self, replica: Replica, error: ConcordError) -> None:
        """Report it, and wait before the next try.

        Raises:
            ConcordError: `error`, where no replica is left and none comes up.
        """
        await self._replicas.retire(replica)
        self._failed_starts[replica.slot] += 1
        attempt = self._failed_starts[replica.slot]
        pause_s = min(self._deadlines.restart_pause_s * 2.0 ** (attempt - 1), LONGEST_PAUSE_S)
        fields = {"replica": replica.slot, "attempt": attempt, "reason": str(error), "pause_s": pause_s}
        await self._store.record_event("replica_start_failed", {**fields})
        none_is_left = all(replica.applied is None for replica in self._replicas)
        if none_is_left and all(failed >= MAX_FAILED_STARTS for failed in self._failed_starts.values()):
            raise error
        await asyncio.sleep(pause_s)
