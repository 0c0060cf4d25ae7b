"""The engine replicas of a run: which serve, under which policy, and what happens to one that fails.

Owns the slots. A replica is a slot plus an incarnation (one more at every restart). It serves when it has answered for
the committed policy; a failing one is killed, its tainted tokens are remembered, and a new incarnation starts on the
committed weights.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from actors.ports import EnginePort, Fleet, WorkerPort
from orchestrator.config import DeadlinesConfig
from orchestrator.deadlines import within
from orchestrator.replicas.registration import Expectation, canary_gap, check_registration
from rollout.errors import ConcordError, ProcessLostError, WeightSyncError, first_error
from rollout.types.generation import PauseMode
from rollout.types.protocols import EngineLoad
from rollout.types.trajectory import EngineTag
from rollout.types.weights import ApplyReport, PolicyVersion, WeightManifest


@dataclass(slots=True, kw_only=True)
class Replica:
    """One slot and its present incarnation."""

    slot: int
    incarnation: int = 0
    port: EnginePort | None = None
    tag: EngineTag | None = None
    applied: PolicyVersion | None = None
    """The policy it last answered for; None while it is starting or dead."""
    tolerance_nats: float = 0.0
    canary_gap_nats: float = 0.0
    """Of its newest answer to a canary; infinity when it received other bytes than were published, or answered
    nonsense."""
    assigned: int = 0
    """Groups handed out to it and not yet back."""
    busy_s: float = 0.0
    """Busy seconds of earlier incarnations."""
    generated_tokens: int = 0
    """Sampled tokens of earlier incarnations."""
    metrics_address: str = ""
    """host:port of the engine's own metrics; empty where it has none, and while it is dead."""
    digest_mismatches: int = 0
    """Updates of which it received other bytes than were published, over all incarnations."""
    load: EngineLoad = field(default_factory=lambda: EngineLoad(running=0, busy_s=0.0, generated_tokens=0))


class Replicas:
    """All slots of the run."""

    def __init__(self, fleet: Fleet, deadlines: DeadlinesConfig, expected: Expectation) -> None:
        self._fleet = fleet
        self._deadlines = deadlines
        self._expected = expected
        self._slots = [Replica(slot=slot) for slot in range(expected.engine.replicas)]
        self._workers: list[WorkerPort] = []
        self.tainted: set[tuple[int, int, PolicyVersion]] = set()
        """(slot, incarnation, policy) under which a failing replica may have sampled."""

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
        the run expects.

        Raises:
            ConcordError: it did not start, or is not what the run expects (`orchestrator.replicas.registration`).
        """
        replica.incarnation += 1
        replica.port = await self._fleet.new_engine(replica.slot)
        started = await within(
            replica.port.start(manifest), self._deadlines.engine_start_s, f"engine replica {replica.slot} to start"
        )
        gap = check_registration(f"engine replica {replica.slot}", manifest, self._expected, started)
        replica.canary_gap_nats = gap
        if replica.tolerance_nats == 0.0:
            replica.tolerance_nats = 3.0 * max(gap, self._expected.weights.canary_floor_nats)
        replica.tag, replica.metrics_address = started.tag, started.metrics_address
        replica.applied = manifest.policy
        for worker in self._workers:
            await worker.connect(replica.slot, replica.port, started.tag)

    async def attach(self, worker: WorkerPort) -> None:
        """Connect a new episode worker to every live replica."""
        self._workers.append(worker)
        for replica in self._slots:
            if replica.port is not None and replica.tag is not None and replica.applied is not None:
                await worker.connect(replica.slot, replica.port, replica.tag)

    def detach(self, worker: WorkerPort) -> None:
        """Forget a dead episode worker."""
        self._workers.remove(worker)

    async def update(self, replica: Replica, manifest: WeightManifest, mode: PauseMode) -> ApplyReport:
        """Bring one replica to `manifest` and verify it.

        Raises:
            WeightSyncError: digest or canary differ.
            ConcordError: it failed or did not answer in time.
        """
        if replica.port is None:
            raise ProcessLostError(f"engine replica {replica.slot} has no process; it is being restarted")
        answer = await within(
            replica.port.update(manifest, mode),
            self._deadlines.update_s,
            f"engine replica {replica.slot} to apply {manifest.policy.key}",
        )
        if answer.report.digest != manifest.digest:
            replica.canary_gap_nats = math.inf
            replica.digest_mismatches += 1
            raise WeightSyncError(
                f"engine replica {replica.slot} received bytes with digest {answer.report.digest[:12]}, the trainer "
                f"published {manifest.digest[:12]} as {manifest.policy.key}"
            )
        gap = replica.canary_gap_nats = canary_gap(manifest, answer.canary_logprobs)
        if not gap <= replica.tolerance_nats:
            raise WeightSyncError(
                f"engine replica {replica.slot} answered the canary of {manifest.policy.key} {gap:.3g} nats a token "
                f"away from the trainer (tolerance {replica.tolerance_nats:.3g}, 3 x its gap at start): its bytes "
                "agree, what it computes does not"
            )
        replica.applied = manifest.policy
        return answer.report

    async def retire(self, replica: Replica, suspects: Sequence[PolicyVersion] = ()) -> None:
        """Kill the present incarnation; tokens that it sampled under `suspects` are tainted."""
        self.tainted.update((replica.slot, replica.incarnation, policy) for policy in suspects)
        port, replica.port, replica.applied, replica.assigned, replica.metrics_address = replica.port, None, None, 0, ""
        replica.busy_s += replica.load.busy_s
        replica.generated_tokens += replica.load.generated_tokens
        replica.load = EngineLoad(running=0, busy_s=0.0, generated_tokens=0)
        if port is not None:
            await port.kill()

    def serving(self, committed: PolicyVersion) -> list[Replica]:
        """Replicas that have answered for the committed policy, or a newer one."""
        return [r for r in self._slots if r.port is not None and r.applied is not None and r.applied >= committed]

    async def poll(self, on_failure: Callable[[Replica, str], Awaitable[None]]) -> None:
        """Check the health and take the load of every live replica once."""
        await asyncio.gather(
            *(
                self._poll(replica, on_failure)
                for replica in self._slots
                if replica.port is not None and replica.applied is not None
            )
        )

    async def _poll(self, replica: Replica, on_failure: Callable[[Replica, str], Awaitable[None]]) -> None:
        port, incarnation = replica.port, replica.incarnation
        if port is None:
            return
        try:
            healthy = await within(port.healthy(), 10.0, f"engine replica {replica.slot} to say that it is healthy")
            load = await within(port.load(), 10.0, f"engine replica {replica.slot} to say its load")
            reason = "" if healthy else "its engine core is dead"
        except ConcordError as error:
            reason, load = str(error), replica.load
        if replica.incarnation != incarnation or replica.port is not port:
            return
        replica.load = load
        if reason:
            await on_failure(replica, reason)

    def busy_s(self) -> Mapping[int, float]:
        """Busy seconds by slot since the start of the run."""
        return {replica.slot: replica.busy_s + replica.load.busy_s for replica in self._slots}
