"""The engine replicas of a run: which serve, under which policy, and what episode workers know of them.

Owns the slots. A replica serves when it has answered for the committed policy and every episode worker is connected to
it. What becomes of one that fails is decided elsewhere (`orchestrator.weight_sync.lifecycle`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from actors.ports import EnginePort, Fleet, WorkerPort
from orchestrator.config import DeadlinesConfig
from orchestrator.replicas.registration import Expectation, canary_gap, check_registration
from orchestrator.replicas.replica import Replica
from rollout.errors import ConcordError, ProcessLostError, WeightSyncError, first_error
from rollout.tasks import within
from rollout.types.generation import PauseMode
from rollout.types.weights import ApplyReport, PolicyVersion, WeightManifest

HEALTH_S = 10.0
"""A replica that does not say within this time how it is, is not well."""


class Replicas:
    """All slots of the run."""

    def __init__(self, fleet: Fleet, deadlines: DeadlinesConfig, expected: Expectation) -> None:
        self._fleet = fleet
        self._deadlines = deadlines
        self._expected = expected
        self._slots = [Replica(slot) for slot in range(expected.engine.replicas)]
        self._workers: list[WorkerPort] = []
        self._tainted: set[tuple[int, int, PolicyVersion]] = set()

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._slots)

    def __getitem__(self, slot: int) -> Replica:
        return self._slots[slot]

    async def start_all(self, manifest: WeightManifest) -> None:
        """Start every slot on `manifest`; a replica that does not start ends the run.

        Raises:
            ConcordError: what the first one that failed said.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for replica in self._slots:
                    group.create_task(self.start(replica, manifest))
        except* ConcordError as errors:
            raise first_error(errors) from errors

    async def start(self, replica: Replica, manifest: WeightManifest) -> None:
        """Start a new incarnation of a slot on the weights of `manifest`; it gets no work before it is found to be what
        the run expects, and every episode worker can reach it.

        Raises:
            ConcordError: it did not start, or is not what the run expects (`orchestrator.replicas.registration`).
        """
        limit_s, key = self._deadlines.engine_start_s, "deadlines.engine_start_s"
        port = await within(self._fleet.new_engine(replica.slot), limit_s, key, f"a process for {replica.name}")
        replica.begins(port)
        started = await within(port.start(manifest), limit_s, key, f"{replica.name} to start")
        gap = check_registration(replica.name, manifest, self._expected, started)
        replica.has_started(started, gap, self._expected.weights.canary_floor_nats)
        await self._connect_all(replica, port)
        replica.is_ready(manifest.policy)

    async def _connect_all(self, replica: Replica, port: EnginePort) -> None:
        """Returns when every worker that is attached by then knows `replica`; one that is dead is replaced by who
        collects from it, and its successor asks for itself."""
        known: set[WorkerPort] = set()
        while missing := [worker for worker in self._workers if worker not in known]:
            await asyncio.gather(*(self._connect(worker, replica, port) for worker in missing))
            known.update(missing)

    async def _connect(self, worker: WorkerPort, replica: Replica, port: EnginePort) -> None:
        if replica.tag is None:
            return
        connecting = worker.connect(replica.slot, port, replica.tag)
        what = f"an episode worker to reach {replica.name}"
        with suppress(ProcessLostError):
            await within(connecting, self._deadlines.engine_start_s, "deadlines.engine_start_s", what)

    async def attach(self, worker: WorkerPort) -> None:
        """Connect a new episode worker to every replica that has started; those that start later reach it too."""
        self._workers.append(worker)
        for replica in self._slots:
            known: EnginePort | None = None
            while (port := replica.port) is not known and port is not None:  # another incarnation may come meanwhile
                await self._connect(worker, replica, port)
                known = port

    def detach(self, worker: WorkerPort) -> None:
        if worker in self._workers:
            self._workers.remove(worker)

    async def update(self, replica: Replica, manifest: WeightManifest, mode: PauseMode) -> ApplyReport:
        """Bring one replica to `manifest` and verify it.

        Raises:
            WeightSyncError: digest or canary differ.
            ConcordError: it failed or did not answer in time.
        """
        port = replica.port
        if port is None:
            raise ProcessLostError(f"{replica.name} has no process; it is being restarted")
        what = f"{replica.name} to apply {manifest.policy.key}"
        with replica.takes(manifest.policy):
            answer = await within(port.update(manifest, mode), self._deadlines.update_s, "deadlines.update_s", what)
            if answer.report.digest != manifest.digest:
                replica.received_other_bytes()
                raise WeightSyncError(
                    f"{replica.name} received bytes with digest {answer.report.digest[:12]}, the trainer published "
                    f"{manifest.digest[:12]} as {manifest.policy.key}"
                )
            gap = canary_gap(manifest, answer.canary_logprobs)
            if not replica.is_verified(gap):
                raise WeightSyncError(
                    f"{replica.name} answered the canary of {manifest.policy.key} {gap:.3g} nats a token away from the "
                    f"trainer (tolerance {replica.tolerance_nats:.3g}, 3 x its gap at start): its bytes agree, what it "
                    "computes does not"
                )
        return answer.report

    async def retire(self, replica: Replica) -> None:
        port = replica.goes()
        if port is not None:
            await port.kill()

    def taint(self, slot: int, incarnation: int, policies: Sequence[PolicyVersion]) -> None:
        """This incarnation failed verification: what it sampled under `policies` is not theirs."""
        self._tainted.update((slot, incarnation, policy) for policy in policies)

    def is_tainted(self, slot: int, incarnation: int, policies: frozenset[PolicyVersion]) -> bool:
        """Whether an incarnation that failed verification sampled under one of `policies`."""
        return any((slot, incarnation, policy) in self._tainted for policy in policies)

    def serving(self, committed: PolicyVersion) -> list[Replica]:
        """Replicas that have answered for the committed policy, or a newer one."""
        return [replica for replica in self._slots if replica.serves(committed)]

    async def poll(self, on_failure: Callable[[int, int, str], Awaitable[None]]) -> None:
        """Check the health and take the load of every live replica once; `on_failure` gets slot, incarnation, reason of
        each that is not well."""
        started = [replica for replica in self._slots if replica.port is not None and replica.applied is not None]
        await asyncio.gather(*(self._poll(replica, on_failure) for replica in started))

    async def _poll(self, replica: Replica, on_failure: Callable[[int, int, str], Awaitable[None]]) -> None:
        port, incarnation = replica.port, replica.incarnation
        if port is None:
            return
        try:
            healthy = await within(port.healthy(), HEALTH_S, "", f"{replica.name} to say that it is healthy")
            load = await within(port.load(), HEALTH_S, "", f"{replica.name} to say its load")
            reason = "" if healthy else "its engine core is dead"
        except ConcordError as error:
            reason, load = str(error), replica.load
        if not replica.is_live(incarnation):
            return
        replica.reports(load)
        if reason:
            await on_failure(replica.slot, incarnation, reason)

    def busy_s(self) -> Mapping[int, float]:
        """Busy seconds by slot since the start of the run."""
        return {replica.slot: replica.busy_s for replica in self._slots}
