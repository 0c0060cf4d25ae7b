"""Weights from GPU to GPU, without a GPU: who waits for whom, who meets where, and what a transfer that breaks off
says."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.builders import build_tag
from support.loop.local_fleet import EngineWrap, LocalFleet, QuietReporter, inputs_of
from support.paths import MODEL

from actors.ports import Fleet, Started, TrainerPort, Updated
from orchestrator.config import DeadlinesConfig, parse_config
from orchestrator.launch.launch import drive
from orchestrator.replicas.registration import Expectation
from orchestrator.replicas.replicas import Replica, Replicas
from orchestrator.run_dir.layout import create_run_dir
from orchestrator.weight_sync.publication import Publisher
from orchestrator.weight_sync.transfer import GpuTransfer, Transfer
from rollout.config import SamplingConfig, ScriptedConfig
from rollout.engines.vllm.transfer import Rendezvous, init_info
from rollout.errors import EngineError, UserError, WeightSyncError
from rollout.tokenization.agreement import TokenizerIdentity
from rollout.types.dispatch import LedgerEntry
from rollout.types.generation import PauseMode
from rollout.types.protocols import Store
from rollout.types.weights import ApplyReport, Canary, PolicyVersion, TensorEntry, Transport, WeightManifest
from trainer.config.trainer import WeightsConfig
from trainer.step.scripted import ScriptedTrainer
from trainer.weights.weight_sender import WeightSender

DEADLINE_S = 20.0
ENTRIES = tuple(TensorEntry(name=name, dtype="F32", shape=(1,), sha256="0" * 64) for name in ("a", "b", "c"))
TOKENIZER = TokenizerIdentity(fingerprint_fields={"vocab": "0" * 64}, probes={})
ORDER = {"c": 0, "a": 1, "b": 2}


def manifest(version: int, transport: Transport = Transport.DISK, location: str = "/run/weights") -> WeightManifest:
    canary = Canary(token_ids=np.zeros(2, dtype=np.int32), logprobs=np.zeros(1, dtype=np.float32))
    return WeightManifest(
        policy=PolicyVersion(1, version),
        transport=transport,
        location=location,
        tensors=ENTRIES,
        digest="d",
        canary=canary,
        num_bytes=12,
    )


# --- the driver ------------------------------------------------------------------------------------------------------


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

        async def ignore(*_: object) -> None:
            return None

        store = cast(Store, ledger)
        publisher = Publisher(
            replicas=replicas,
            store=store,
            first=first,
            mode=PauseMode.RECOMPUTE,
            on_commit=ignore,
            on_failure=ignore,
            transfer=transfer,
        )
        running = asyncio.create_task(publisher.run())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await work(publisher, ports, ledger, running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

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
        announced = await transfer.announce(manifest(1), [Replica(slot=0, incarnation=3)])
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


# --- a trainer rank --------------------------------------------------------------------------------------------------


@dataclass
class Connection:
    """An open sender."""

    meeting: Rendezvous
    names: list[str]
    broken: bool = False
    sent: int = 0
    closed: bool = False

    def send(self) -> None:
        if self.broken:
            raise RuntimeError("ncclRemoteError")
        self.sent += 1

    def close(self) -> None:
        self.closed = True


class Rank:
    """A rank's transfer, and every connection that it has opened."""

    def __init__(self, transport: Transport) -> None:
        self.connections: list[Connection] = []
        self.broken = False
        self.transfer = WeightSender(transport, 0, torch.device("cpu"), self._source, self._connect)

    def _source(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def _connect(self, meeting: Rendezvous, manifest: WeightManifest, rank: int, source: object) -> Connection:
        self.connections.append(Connection(meeting, [entry.name for entry in manifest.tensors], self.broken))
        return self.connections[-1]

    def update(self, *members: tuple[int, int], place: str = "127.0.0.1", version: int = 1) -> WeightManifest:
        announced = self.transfer.open(manifest(version), ORDER, members, 2, place)
        self.transfer.send(announced)
        return announced


def test_a_transfer_keeps_policy_and_digest_and_lists_tensors_as_they_are_sent() -> None:
    announced = Rank(Transport.NCCL).update((0, 1))
    assert [entry.name for entry in announced.tensors] == ["c", "a", "b"]
    assert (announced.policy, announced.digest, announced.transport) == (PolicyVersion(1, 1), "d", Transport.NCCL)


def test_a_group_is_kept_while_its_members_are_the_same() -> None:
    rank = Rank(Transport.NCCL)
    locations = [rank.update((0, 1), (1, 1), version=version).location for version in (1, 2)]
    assert locations[0] == locations[1]
    assert [connection.sent for connection in rank.connections] == [2]


def test_a_new_incarnation_makes_a_new_group_and_ends_the_old_one() -> None:
    rank = Rank(Transport.NCCL)
    rank.update((0, 1), (1, 1))
    rank.update((0, 1), (1, 2))
    assert [(c.sent, c.closed) for c in rank.connections] == [(1, True), (1, False)]
    assert rank.connections[0].meeting.port != rank.connections[1].meeting.port


def test_a_group_without_the_dead_has_room_for_the_living_only() -> None:
    meeting = Rendezvous.parse(Rank(Transport.NCCL).update((0, 1), (2, 4)).location)
    assert (meeting.world_size, meeting.first_ranks) == (5, (0, 4))
    assert [init_info(meeting, first_rank)["rank_offset"] for first_rank in (0, 4)] == [1, 3]
    with pytest.raises(EngineError, match="first rank is 2"):
        init_info(meeting, 2)


def test_after_a_broken_transfer_the_next_one_meets_elsewhere() -> None:
    rank = Rank(Transport.NCCL)
    rank.broken = True
    with pytest.raises(WeightSyncError, match="ncclRemoteError"):
        rank.update((0, 1))
    rank.broken = False
    rank.update((0, 1))
    assert rank.connections[0].meeting != rank.connections[1].meeting


def test_exports_are_let_go_of_by_the_next_step_and_a_group_is_not(tmp_path: Path) -> None:
    ipc, nccl = Rank(Transport.IPC), Rank(Transport.NCCL)
    ipc.update((0, 1), place=str(tmp_path))
    nccl.update((0, 1))
    for rank in (ipc, nccl):
        rank.transfer.release()
    assert ipc.connections[0].closed
    assert not nccl.connections[0].closed


def test_engines_never_find_the_exports_of_an_earlier_version(tmp_path: Path) -> None:
    place = tmp_path / "a #1 run"
    place.mkdir()
    (place / "rank7.handles").write_bytes(b"old")
    announced = Rank(Transport.IPC).update((0, 1), place=str(place))
    assert Rendezvous.parse(announced.location).path == str(place)
    assert list(place.iterdir()) == []
