"""A trainer rank that sends weights, without a GPU: who meets where, and what is kept between two updates."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.trainer.manifests import disk_manifest

from rollout.engines.vllm.transfer import Rendezvous, init_info
from rollout.errors import EngineError, WeightSyncError
from rollout.types.weights import PolicyVersion, Transport, WeightManifest
from trainer.weights.weight_sender import WeightSender

ORDER = {"c": 0, "a": 1, "b": 2}


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
        announced = self.transfer.open(disk_manifest(version), ORDER, members, 2, place)
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
