"""Engine replicas without engines: a fleet of ports whose every answer a test holds back, and the parts that drive
them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np
from support.builders import build_tag

from actors.ports import EnginePort, Fleet, Started, Updated, WorkerPort
from orchestrator.config import DeadlinesConfig
from orchestrator.observers import Observer, Observers, ReplicaFailure
from orchestrator.replicas.registration import Expectation
from orchestrator.replicas.replicas import Replicas
from orchestrator.weight_sync.committed import CommittedWeights
from orchestrator.weight_sync.lifecycle import ReplicaLifecycle
from orchestrator.weight_sync.publication import PublicationRules, Publisher
from rollout.config import SamplingConfig, ScriptedConfig
from rollout.errors import EngineError, ProcessLostError
from rollout.tokenization.agreement import TokenizerIdentity
from rollout.types.dispatch import LedgerEntry
from rollout.types.generation import PauseMode
from rollout.types.protocols import EngineLoad, Store
from rollout.types.trajectory import EngineTag
from rollout.types.weights import ApplyReport, Canary, PolicyVersion, TensorEntry, Transport, WeightManifest
from trainer.config.trainer import WeightsConfig

DEADLINE_S = 20.0
TOKENIZER = TokenizerIdentity(fingerprint_fields={"vocab": "0" * 64}, probes={})


def manifest(version: int) -> WeightManifest:
    canary = Canary(token_ids=np.zeros(2, dtype=np.int32), logprobs=np.zeros(1, dtype=np.float32))
    return WeightManifest(
        policy=PolicyVersion(1, version),
        transport=Transport.DISK,
        location="/run/weights",
        tensors=(TensorEntry(name="a", dtype="F32", shape=(1,), sha256="0" * 64),),
        digest="d",
        canary=canary,
        num_bytes=4,
    )


class Engine:
    """One incarnation. It starts and updates once its slot's gates are open."""

    def __init__(self, slot: "Slot") -> None:
        self.slot = slot
        self.dead = False
        self.applied: list[int] = []

    def _check(self) -> None:
        if self.dead:
            raise ProcessLostError("the engine was killed")

    async def start(self, first: WeightManifest) -> Started:
        self.slot.starts += 1
        await self.slot.may_start.wait()
        self._check()
        if self.slot.failing_starts:
            self.slot.failing_starts -= 1
            raise EngineError("no memory is left on this machine")
        return Started(
            tag=build_tag(weights_digest=first.digest), canary_logprobs=first.canary.logprobs, tokenizer=TOKENIZER
        )

    async def update(self, new: WeightManifest, mode: PauseMode) -> Updated:
        self.slot.asked_to_update.set()
        await self.slot.may_update.wait()
        self._check()
        self.applied.append(new.policy.version)
        report = ApplyReport(policy=new.policy, digest=self.slot.digest or new.digest, pause_s=0.0, interrupted=0)
        return Updated(report=report, canary_logprobs=new.canary.logprobs)

    async def healthy(self) -> bool:
        self._check()
        return True

    async def load(self) -> EngineLoad:
        return EngineLoad(running=0, busy_s=0.0, generated_tokens=0)

    async def kill(self) -> None:
        self.dead = True


class Slot:
    """What a test lets the incarnations of one slot do."""

    def __init__(self) -> None:
        self.may_start, self.may_update, self.asked_to_update = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.may_update.set()
        self.starts = self.failing_starts = 0
        self.digest = ""
        self.engines: list[Engine] = []


class Worker:
    """An episode worker that learns of engines once `may_connect` is open."""

    def __init__(self) -> None:
        self.may_connect = asyncio.Event()
        self.may_connect.set()
        self.asked = asyncio.Event()
        self.dead = False
        self.knows: dict[int, EnginePort] = {}

    async def connect(self, slot: int, engine: EnginePort, tag: EngineTag) -> None:
        self.asked.set()
        await self.may_connect.wait()
        if self.dead:
            raise ProcessLostError("the episode worker was killed")
        self.knows[slot] = engine


class Heard(Observer):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.failed: list[ReplicaFailure] = []
        self.committed: asyncio.Queue[int] = asyncio.Queue()
        self.serves: asyncio.Queue[int] = asyncio.Queue()

    async def replica_failed(self, failure: ReplicaFailure) -> None:
        self.failed.append(failure)

    def replica_serves(self, slot: int) -> None:
        self.serves.put_nowait(slot)

    def version_committed(self, policy: PolicyVersion, reports: Sequence[ApplyReport]) -> None:
        self.committed.put_nowait(policy.version)


class ReplicaRoom:
    """Replicas which serve version 0, their lifecycle and a publisher, over such engines; and the store's few calls."""

    def __init__(self, slots: int, *, straggler_s: float = DEADLINE_S, quorum: int = 1) -> None:
        self.slots = [Slot() for _ in range(slots)]
        self.entries: list[int] = []
        self.events: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self.heard = Heard()
        deadlines = DeadlinesConfig(restart_pause_s=0.001)
        expected = Expectation(
            tokenizer=TOKENIZER,
            engine=ScriptedConfig(replicas=slots),
            sampling=SamplingConfig(),
            weights=WeightsConfig(),
        )
        observers = Observers()
        observers.add(self.heard)
        self.replicas = Replicas(cast(Fleet, self), deadlines, expected)
        self.weights = CommittedWeights(manifest(0))
        store = cast(Store, self)
        self.lifecycle = ReplicaLifecycle(
            replicas=self.replicas,
            weights=self.weights,
            store=store,
            mode=PauseMode.RECOMPUTE,
            deadlines=deadlines,
            observers=observers,
        )
        self.publisher = Publisher(
            replicas=self.replicas,
            lifecycle=self.lifecycle,
            weights=self.weights,
            store=store,
            rules=PublicationRules(every_version=False, quorum=quorum, straggler_s=straggler_s),
            observers=observers,
        )

    async def new_engine(self, slot: int) -> Engine:
        self.slots[slot].engines.append(Engine(self.slots[slot]))
        return self.slots[slot].engines[-1]

    async def commit_version(self, entry: LedgerEntry) -> None:
        self.entries.append(entry.policy.version)

    async def record_event(self, kind: str, fields: dict[str, Any]) -> None:
        self.events.put_nowait((kind, fields))

    async def event(self, kind: str) -> dict[str, Any]:
        """The next event of this kind."""
        while True:
            got, fields = await self.events.get()
            if got == kind:
                return fields

    def manifest(self, version: int) -> WeightManifest:
        return manifest(version)

    def serving(self) -> list[int]:
        return [replica.slot for replica in self.replicas.serving(self.weights.policy)]

    def attach(self, worker: Worker) -> Awaitable[None]:
        return self.replicas.attach(cast(WorkerPort, worker))

    def run(self, work: Callable[[], Awaitable[None]], *, started: bool = True) -> None:
        """`work`, while lifecycle and publisher run.

        Raises:
            ConcordError: what ended one of them.
        """

        async def main() -> None:
            async with asyncio.timeout(DEADLINE_S):
                if started:
                    await self.replicas.start_all(self.weights.manifest)
                running = [asyncio.create_task(part.run()) for part in (self.lifecycle, self.publisher)]
                working = asyncio.ensure_future(work())
                try:
                    await asyncio.wait([*running, working], return_when=asyncio.FIRST_COMPLETED)
                    for task in running:
                        if task.done():
                            await task
                    await working
                finally:
                    for task in (*running, working):
                        task.cancel()
                    await asyncio.gather(*running, working, return_exceptions=True)

        asyncio.run(main())


async def settle() -> None:
    """Let everything that can go on go on."""
    for _ in range(50):
        await asyncio.sleep(0)
