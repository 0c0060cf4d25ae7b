"""One trainer rank's half of a GPU transport: where engines meet it, and the current weights sent to them without the
disk.

The bytes move through the inference engine's own transfer, behind `Connection`. It knows no Ray, no schedule and no
replica's state.
"""

import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rollout.engines.vllm.launch import quiet_vllm
from rollout.engines.vllm.transfer import IpcSender, NcclSender, Rendezvous
from rollout.errors import WeightSyncError, boundary
from rollout.types.weights import Transport, WeightManifest

Members = tuple[tuple[int, int], ...]
"""(slot, incarnation) of the replicas of a transfer."""
Source = Callable[[], Iterator[tuple[str, Tensor]]]
"""A new pass over the whole tensors, in the order of the manifest. Collective."""


class Connection(Protocol):
    """An open connection to the engines."""

    def send(self) -> None:
        """Send all tensors once."""
        ...

    def close(self) -> None:
        """Let go of the connection and of every tensor."""
        ...


def vllm_sender(rendezvous: Rendezvous, manifest: WeightManifest, rank: int, source: Source) -> Connection:
    """Connect to vLLM's workers; with nccl, rank 0 blocks until all have joined."""
    quiet_vllm()
    if rendezvous.transport is Transport.NCCL:
        return NcclSender(rendezvous, manifest.tensors, rank, source)
    return IpcSender(rendezvous, rank, source)


class WeightSender:
    """Lives as long as its rank; keeps an NCCL group as long as its members stay the same."""

    def __init__(
        self,
        transport: Transport,
        rank: int,
        device: torch.device,
        source: Source,
        connect: Callable[[Rendezvous, WeightManifest, int, Source], Connection] = vllm_sender,
    ) -> None:
        self._transport, self._rank, self._device = transport, rank, device
        self._source, self._connect = source, connect
        self._opened: tuple[Members, Rendezvous] | None = None
        self._connected: tuple[str, Connection] | None = None

    def open(
        self,
        manifest: WeightManifest,
        order: Mapping[str, int],
        members: Sequence[tuple[int, int]],
        workers: int,
        place: str,
    ) -> WeightManifest:
        """The manifest of the transfer, on rank 0: its location is the rendezvous, its tensors stand in the order in
        which they are sent.

        Args:
            manifest: what was published to disk, of the same weights.
            order: place of each tensor in a pass over the source.
            members: (slot, incarnation) of every replica that will apply it; when they change, so does the rendezvous.
            workers: GPUs of one replica.
            place: nccl: this machine's address as engines see it; ipc: a directory that trainer and engines share.
        """
        with boundary(WeightSyncError, f"cannot open a transfer at {place}"):
            rendezvous = self._rendezvous(tuple(sorted(members)), workers, place)
        tensors = tuple(sorted(manifest.tensors, key=lambda tensor: order[tensor.name]))
        return replace(manifest, transport=self._transport, location=rendezvous.location, tensors=tensors)

    def _rendezvous(self, members: Members, workers: int, place: str) -> Rendezvous:
        if self._transport is Transport.IPC:
            directory = Path(place)
            directory.mkdir(exist_ok=True)
            for stale in directory.glob("rank*"):
                stale.unlink()
            return Rendezvous(transport=Transport.IPC, path=place)
        if self._opened is None or self._opened[0] != members:
            found = Rendezvous(
                transport=Transport.NCCL,
                host=place,
                port=free_port(place),
                world_size=1 + len(members) * workers,
                first_ranks=tuple(slot * workers for slot, _ in members),
            )
            self._opened = (members, found)
        return self._opened[1]

    def send(self, manifest: WeightManifest) -> None:
        """Send the current weights under a manifest of `open`. Collective; when it returns they may change (ipc: after
        `release`).

        Raises:
            WeightSyncError: it broke off; the next `open` names a new rendezvous.
        """
        whole = False
        try:
            with boundary(WeightSyncError, f"trainer rank {self._rank} at {manifest.location}"), _current(self._device):
                self._connection(manifest).send()
            whole = True
        finally:
            if not whole:
                self._opened = self._connected = None  # a broken group cannot be left in order

    def _connection(self, manifest: WeightManifest) -> Connection:
        if self._connected is None or self._connected[0] != manifest.location:
            self.close()
            rendezvous = Rendezvous.parse(manifest.location)
            self._connected = (manifest.location, self._connect(rendezvous, manifest, self._rank, self._source))
        return self._connected[1]

    def release(self) -> None:
        """All engines have what was sent: let go of exported tensors. An NCCL group stays."""
        if self._transport is Transport.IPC:
            self.close()

    def close(self) -> None:
        if self._connected is not None:
            connection, self._connected = self._connected[1], None
            connection.close()


def free_port(host: str) -> int:
    """A TCP port of `host` (an IPv4 address of this machine) that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextmanager
def _current(device: torch.device) -> Generator[None]:
    """Make `device` the current one, with all its work done before and after: tensors are read on streams of their
    own."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        yield
        torch.cuda.synchronize()
