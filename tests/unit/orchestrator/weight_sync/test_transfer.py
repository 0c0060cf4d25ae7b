"""Weights from GPU to GPU, without a GPU: who waits for whom, and what a transfer that breaks off says."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.builders import build_tag
from support.loop.engine_wrap import EngineWrap
from support.loop.local_fleet import LocalFleet, QuietReporter, inputs_of
from support.paths import MODEL
from support.trainer.manifests import disk_manifest as manifest

from actors.ports import Fleet, Started, TrainerPort, Updated
from orchestrator.config import DeadlinesConfig, parse_config
from orchestrator.launch.launch import drive
from orchestrator.observers import Observers
from orchestrator.replicas.registration import Expectation
from orchestrator.replicas.replicas import Replica, Replicas
from orchestrator.run_dir.layout import create_run_dir
from orchestrator.weight_sync.committed import CommittedWeights
from orchestrator.weight_sync.lifecycle import ReplicaLifecycle
from orchestrator.weight_sync.publication import PublicationRules, Publisher
from orchestrator.weight_sync.transfer import GpuTransfer, Transfer
from rollout.config import SamplingConfig, ScriptedConfig
from rollout.errors import EngineError, UserError, WeightSyncError
from rollout.tokenization.agreement import TokenizerIdentity
from rollout.types.dispatch import LedgerEntry
from rollout.types.generation import PauseMode
from rollout.types.protocols import Store
from rollout.types.weights import ApplyReport, Transport, WeightManifest
from trainer.config.trainer import WeightsConfig
from trainer.step.scripted import ScriptedTrainer

DEADLINE_S = 20.0
TOKENIZER = TokenizerIdentity(fingerprint_fields={"vocab": "0" * 64}, probes={})


class Port:
    """An engine that answers for every manifest, updates once `gate` is open."""

    def __init__(self, gate: asyncio.Event) -> None:
        self.gate, self.applied = gate, list[WeightManifest]()

    async def start(self, manifest: WeightManifest) -> Started:
        return Started(
            tag=build_tag(weights_digest=manifest.digest), canary_logprobs=manifest.canary.logprobs, tokenizer=TOKENIZER
        )

    async def update(self, manifest: WeightManifest, mode: PauseMode) -> Updated:
        await self.gate.wait()
        self.applied.append(manifest)
        report = ApplyReport(policy=manifest.policy, digest=manifest.digest, pause_s=0.0, interrupted=0)
        return Updated(report=report, canary_logprobs=manifest.canary.logprobs)


class Ports:
    """A fleet of such engines."""

    def __init__(self, gate: asyncio.Event) -> None:
        self.gate, self.engines = gate, dict[int, Port]()

    async def new_engine(self, slot: int) -> Port:
        self.engines[slot] = Port(self.gate)
        return self.engines[slot]


class Ledger:
    """The one call that a publication makes to the store."""

    def __init__(self) -> None:
        self.entries: list[LedgerEntry] = []

    async def commit_version(self, entry: LedgerEntry) -> None:
        self.entries.append(entry)


@dataclass
class Trainer:
    """A trainer's sending half that notes what it is asked."""

    transport: Transport = Transport.NCCL
    calls: list[tuple[str, Any]] = field(default_factory=list)
    sending: asyncio.Event = field(default_factory=asyncio.Event)
    may_send: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""

    async def open_transfer(
        self, manifest: WeightManifest, members: Sequence[tuple[int, int]], workers: int
    ) -> WeightManifest:
        self.calls.append(("open", (tuple(members), workers)))
        return replace(manifest, transport=self.transport, location="meeting")

    async def send(self, manifest: WeightManifest) -> None:
        self.calls.append(("send", manifest.policy.version))
        self.sending.set()
        await self.may_send.wait()
        if self.error:
            raise EngineError(self.error)


def transfer_of(trainer: Trainer, deadline_s: float = DEADLINE_S) -> GpuTransfer:
    return GpuTransfer(cast(TrainerPort, trainer), 2, deadline_s)


def publish(
    work: Callable[[Publisher, Ports, Ledger, "asyncio.Task[None]"], Awaitable[None]], transfer: Transfer | None
) -> None:
    """`work` with a publisher that runs over two replicas which serve version 0."""

    async def main() -> None:
        ports, ledger, first = Ports(asyncio.Event()), Ledger(), manifest(0)
        expected = Expectation(
            tokenizer=TOKENIZER, engine=ScriptedConfig(replicas=2), sampling=SamplingConfig(), weights=WeightsConfig()
        )
        replicas = Replicas(cast(Fleet, ports), DeadlinesConfig(), expected)
        await replicas.start_all(first)

        store, weights, observers = cast(Store, ledger), CommittedWeights(first), Observers()
        lifecycle = ReplicaLifecycle(
            replicas=replicas,
            weights=weights,
            store=store,
            mode=PauseMode.RECOMPUTE,
            deadlines=DeadlinesConfig(),
            observers=observers,
        )
        publisher = Publisher(
            replicas=replicas,
            lifecycle=lifecycle,
            weights=weights,
            store=store,
            rules=PublicationRules(every_version=False, quorum=1, straggler_s=DEADLINE_S),
            observers=observers,
            transfer=transfer,
        )
        owner = asyncio.create_task(lifecycle.run())
        running = asyncio.create_task(publisher.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await work(publisher, ports, ledger, running)
        finally:
            for task in (running, owner):
                task.cancel()
            await asyncio.gather(running, owner, return_exceptions=True)

    asyncio.run(main())


def test_the_trainer_does_not_wait_for_engines_that_read_from_disk() -> None:
    async def work(publisher: Publisher, ports: Ports, ledger: Ledger, running: "asyncio.Task[None]") -> None:
        publisher.offer(manifest(1))
        await publisher.transferred()
        assert not ledger.entries

    publish(work, None)


def test_the_trainer_waits_until_engines_have_what_it_sends() -> None:
    trainer = Trainer()

    async def work(publisher: Publisher, ports: Ports, ledger: Ledger, running: "asyncio.Task[None]") -> None:
        publisher.offer(manifest(1))
        waiting = asyncio.create_task(publisher.transferred())
        await trainer.sending.wait()
        assert not waiting.done()
        trainer.may_send.set()
        ports.gate.set()
        await waiting
        assert [entry.policy.version for entry in ledger.entries] == [1]

    publish(work, transfer_of(trainer))
    assert trainer.calls == [("open", (((0, 1), (1, 1)), 2)), ("send", 1)]


def test_engines_apply_the_transfer_and_new_incarnations_start_from_disk() -> None:
    trainer = Trainer()
    trainer.may_send.set()

    async def work(publisher: Publisher, ports: Ports, ledger: Ledger, running: "asyncio.Task[None]") -> None:
        ports.gate.set()
        for version in (1, 2):
            publisher.offer(manifest(version))
            await publisher.transferred()
        applied = [(m.policy.version, m.transport, m.location) for m in ports.engines[1].applied]
        assert applied == [(1, Transport.NCCL, "meeting"), (2, Transport.NCCL, "meeting")]
        assert (publisher.committed.policy.version, publisher.committed.transport) == (2, Transport.DISK)

    publish(work, transfer_of(trainer))


def test_a_transfer_that_breaks_off_ends_the_run_with_the_cure() -> None:
    trainer = Trainer(error="the wire is cut")
    trainer.may_send.set()

    async def work(publisher: Publisher, ports: Ports, ledger: Ledger, running: "asyncio.Task[None]") -> None:
        publisher.offer(manifest(1))
        with pytest.raises(WeightSyncError, match=r'(?s)the wire is cut.*weights\.transport = "disk"'):
            await running
        assert not ledger.entries
        assert not ports.engines[0].applied

    publish(work, transfer_of(trainer))


def test_a_sender_that_hangs_is_given_up_at_its_deadline() -> None:
    async def work(publisher: Publisher, ports: Ports, ledger: Ledger, running: "asyncio.Task[None]") -> None:
        publisher.offer(manifest(1))
        with pytest.raises(WeightSyncError, match=r"waited 0\.05 s for the trainer to send e1-v1"):
            await running

    publish(work, transfer_of(Trainer(), 0.05))


def test_ipc_is_exported_before_engines_apply_and_nccl_sent_while_they_do() -> None:
    async def calls(transport: Transport) -> list[list[str]]:
        trainer = Trainer(transport)
        trainer.may_send.set()
        transfer = transfer_of(trainer)
        announced = await transfer.announce(manifest(1), [Replica(0)])
        before = [name for name, _ in trainer.calls]
        await transfer.send(announced)
        return [before, [name for name, _ in trainer.calls]]

    assert asyncio.run(calls(Transport.IPC)) == [["open", "send"], ["open", "send"]]
    assert asyncio.run(calls(Transport.NCCL)) == [["open"], ["open", "send"]]


def test_no_step_begins_while_an_engine_takes_weights_from_the_trainer(tmp_path: Path) -> None:
    """The whole loop: each `apply` gives the next step ample time to begin, and it does not."""
    document: dict[str, object] = {
        "run": {"dir": str(tmp_path), "name": "run", "steps": 4, "batch_groups": 2, "group_size": 2},
        "engine": {"type": "scripted", "replicas": 2},
        "trainer": {"type": "scripted"},
        "consistency": {"mode": "off"},
    }
    disk = parse_config(document, "test")
    config = disk.model_copy(
        update={"weights": disk.weights.model_copy(update={"transport": "nccl"})}
    )  # past the check for GPUs
    run, early = create_run_dir(config, "run"), list[int]()

    async def main() -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        class Patient(EngineWrap):
            async def apply(self, manifest: WeightManifest) -> ApplyReport:
                begun = len(fleet.trainer.batches)
                for _ in range(200):
                    await fleet.store.counts()
                early.extend([manifest.policy.version] if len(fleet.trainer.batches) > begun else [])
                return await self.engine.apply(manifest)

        fleet = LocalFleet(
            config, run.path, MODEL, ScriptedTrainer(config.trainer), lambda engine, slot: Patient(engine)
        )
        inputs = inputs_of(config, MODEL)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await drive(config, run, inputs, fleet, QuietReporter())
        finally:
            await fleet.close()
        return fleet.trainer.sent

    sent = asyncio.run(main())
    assert early == []
    assert sent == [(version, ((0, 1), (1, 1))) for version in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("engine.type=vllm", "weights.transport=nccl", "engine.num_gpus=0.5", "trainer.num_gpus=0.5"),
            "set both to 1 or more",
        ),
        (("engine.type=vllm", "weights.transport=ipc", "engine.num_gpus=1", "trainer.num_gpus=1"), "set both below 1"),
        (
            (
                "engine.type=vllm",
                "weights.transport=ipc",
                "engine.num_gpus=0.5",
                "trainer.num_gpus=0.5",
                "trainer.type=scripted",
            ),
            "which sends nothing",
        ),
    ],
)
def test_a_transport_that_its_placement_cannot_carry_is_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_config({}, "test", overrides)


def test_each_transport_has_a_placement() -> None:
    for transport, gpus in (("nccl", 1), ("ipc", 0.5)):
        overrides = (
            "engine.type=vllm",
            f"weights.transport={transport}",
            f"engine.num_gpus={gpus}",
            f"trainer.num_gpus={gpus}",
        )
        assert parse_config({}, "test", overrides).weights.transport == transport
