"""Weights from GPU to GPU through vLLM's own transfer engines: the receiving half inside the worker, the sending half
for the trainer.

The sender runs in the trainer's process and is handed to it as a callable, so the trainer never names vLLM. Both halves
take the tensors in the order of the manifest. Publication drives the receivers (`Engine.apply`) while the sender sends.

What a trainer must do, on every rank: build one `NcclSender` or `IpcSender`, name its rendezvous as the location of its
manifests, and call `send` after each step. The tensors are full (gathered) ones under their Hugging Face names, in the
order of the manifest; a tied head is left out. With nccl, rank 0 sends while the engines are in `Engine.apply`; with
ipc, all ranks export before it.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, cast
from urllib.parse import parse_qs, quote, unquote, urlsplit

from rollout.errors import EngineError, UserError
from rollout.types.weights import TensorEntry, Transport, WeightManifest

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

Tensors = Iterable[tuple[str, "Tensor"]]

TORCH_NAMES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F64": "float64",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where trainer and workers meet: `nccl://HOST:PORT?world_size=N` (sender and all workers) or `ipc:///DIRECTORY`
    (where trainer ranks export handles).

    When some replicas are absent, `&first_ranks=A,B` names those that take part.
    """

    transport: Transport
    host: str = ""
    port: int = 0
    world_size: int = 0
    first_ranks: tuple[int, ...] = ()
    """For each replica that takes part, the rank its first worker has among the receivers of all replicas; empty when
    all take part."""
    path: str = ""

    @classmethod
    def parse(cls, location: str) -> Self:
        """Read a manifest's location.

        Raises:
            UserError: it is neither form.
        """
        parts = urlsplit(location)
        if parts.scheme == "nccl" and parts.hostname and parts.port:
            query = parse_qs(parts.query)
            world, first = query.get("world_size", [""])[0], query.get("first_ranks", [""])[0]
            if world.isdigit() and int(world) > 1:
                first_ranks = tuple(int(rank) for rank in first.split(",") if rank)
                return cls(
                    transport=Transport.NCCL,
                    host=parts.hostname,
                    port=parts.port,
                    world_size=int(world),
                    first_ranks=first_ranks,
                )
        if parts.scheme == "ipc" and parts.path:
            return cls(transport=Transport.IPC, path=unquote(parts.path))
        raise UserError(
            f"got weight rendezvous {location!r}; expected nccl://HOST:PORT?world_size=N (N > 1) or ipc:///DIRECTORY"
        )

    @property
    def location(self) -> str:
        """The inverse of `parse`."""
        if self.transport is Transport.NCCL:
            first = f"&first_ranks={','.join(map(str, self.first_ranks))}" if self.first_ranks else ""
            return f"nccl://{self.host}:{self.port}?world_size={self.world_size}{first}"
        return f"ipc://{quote(self.path)}"

    def worker_rank(self, first_rank: int) -> int:
        """Rank in the NCCL group of the first worker of a replica; the sender is rank 0, the workers of those that take
        part follow.

        Args:
            first_rank: the replica's first rank among the receivers of all replicas.

        Raises:
            EngineError: the replica takes no part.
        """
        if not self.first_ranks:
            return 1 + first_rank
        if first_rank not in self.first_ranks:
            raise EngineError(
                f"got the rendezvous {self.location} on the replica whose first rank is {first_rank}, which it does not"
                " name"
            )
        return 1 + self.first_ranks.index(first_rank) * ((self.world_size - 1) // len(self.first_ranks))


def check_transport(manifest: WeightManifest, *, on_cpu: bool) -> None:
    """Refuse what cannot work here.

    Raises:
        UserError: a GPU transport on CPU.
    """
    if on_cpu and manifest.transport is not Transport.DISK:
        got = f"got weights.transport = {manifest.transport.value!r} on an engine without a GPU"
        raise UserError(f'{got}: it moves bytes between GPUs; set weights.transport = "disk"')


def announced(tensors: Sequence[TensorEntry]) -> list[tuple[str, str, list[int]]]:
    """(name, dtype, shape) of a manifest's tensors, as plain values for the worker."""
    return [(tensor.name, tensor.dtype, list(tensor.shape)) for tensor in tensors]


# --- receiving, in vLLM's worker -------------------------------------------------------------------------------------


class Receiving(Protocol):
    """What the receiver needs of the worker that it works for."""

    vllm_config: "VllmConfig"
    device: "torch.device"
    model_runner: Any


def open_receiver(worker: Receiving, rendezvous: Rendezvous, first_rank: int) -> "WeightTransferEngine[Any, Any]":
    """vLLM's transfer engine for this worker, connected."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    backend = WeightTransferConfig(backend=rendezvous.transport.value)
    receiver = WeightTransferEngineFactory.create_engine(
        backend, worker.vllm_config, worker.device, worker.model_runner.get_model()
    )
    receiver.init_transfer_engine(receiver.parse_init_info(init_info(rendezvous, first_rank)))
    return receiver


def init_info(rendezvous: Rendezvous, first_rank: int) -> dict[str, Any]:
    """How vLLM's worker side joins: the sender is rank 0, workers follow."""
    if rendezvous.transport is Transport.IPC:
        return {"packed": False}
    return {
        "master_address": rendezvous.host,
        "master_port": rendezvous.port,
        "rank_offset": rendezvous.worker_rank(first_rank),
        "world_size": rendezvous.world_size,
        "packed": True,
    }


def update_info(rendezvous: Rendezvous, tensors: Sequence[tuple[str, str, list[int]]]) -> dict[str, Any]:
    """What vLLM's worker side needs to know before each update."""
    unknown = sorted({dtype for _, dtype, _ in tensors} - TORCH_NAMES.keys())
    if unknown:
        raise EngineError(
            f"got tensors of dtype {', '.join(unknown)}; {rendezvous.transport.value} moves {', '.join(TORCH_NAMES)}"
        )
    info: dict[str, Any] = {
        "names": [name for name, _, _ in tensors],
        "dtype_names": [TORCH_NAMES[dtype] for _, dtype, _ in tensors],
        "shapes": [shape for _, _, shape in tensors],
    }
    if rendezvous.transport is Transport.IPC:
        # Handles come from the trainer of this very run, in its run directory; vLLM's own HTTP path pickles them too.
        exports: list[dict[str, dict[str, Any]]] = [
            pickle.loads(file.read_bytes()) for file in sorted(Path(rendezvous.path).glob("rank*.handles"))
        ]
        if not exports:
            raise EngineError(
                f"{rendezvous.path} holds no rank*.handles; the trainer ranks must export their tensors before the "
                "engine applies them"
            )
        info["ipc_handles"] = [
            {uuid: handle for export in exports for uuid, handle in export[name].items()} for name, _, _ in tensors
        ]
    return info


def receive_into(
    receiver: "WeightTransferEngine[Any, Any]", announcement: dict[str, Any], take: Callable[[Tensors], None]
) -> None:
    """Let the transfer engine hand what it receives to `take` instead of straight to the model, so that the bytes can
    be digested on their way."""
    target, config = receiver.model, receiver.model_config
    receiver.set_weight_update_target(cast("torch.nn.Module", _Target(take)), config)
    try:
        receiver.update_weights(announcement)
    finally:
        receiver.set_weight_update_target(target, config)


class _Target:
    """Stands where vLLM's transfer engine expects a model."""

    def __init__(self, take: Callable[[Tensors], None]) -> None:
        self._take = take

    def load_weights(self, weights: Tensors) -> None:
        """One batch of received tensors."""
        self._take(weights)


# --- sending, in the trainer's process -------------------------------------------------------------------------------


class _DrivenByEngines:
    """vLLM's sender wants to drive the receivers; here `Engine.apply` does."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Done by `open_receiver`."""

    def shutdown_weight_transfer_engine(self) -> None:
        """Done when the engine stops."""

    def start_weight_update(self) -> None:
        """Done by the extension."""

    def update_weights(self, update_info: object) -> None:
        """Done by `receive_into`."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Done by the extension."""


class NcclSender:
    """Broadcasts full tensors from trainer rank 0 to all workers of all replicas."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        tensors: Sequence[TensorEntry],
        rank: int,
        fresh: Callable[[], Iterator[tuple[str, "Tensor"]]],
    ) -> None:
        """Open the endpoint: on rank 0 this blocks until every worker has joined, so the engines' first `apply` must
        run meanwhile.

        Args:
            tensors: names, dtypes and shapes in the order in which they are sent.
            rank: this trainer rank; all ranks iterate (a gather is a collective), rank 0 sends.
            fresh: a new pass over the full tensors, in that order.
        """
        import torch
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        class Source(WeightSource):
            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(t.name, getattr(torch, TORCH_NAMES[t.dtype]), t.shape) for t in tensors]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return fresh()

        info = NCCLTrainerInitInfo(rendezvous.host, rendezvous.port, rendezvous.world_size, rank=rank)
        self._engine = WeightTransferTrainerFactory.trainer_init(info, client=_DrivenByEngines(), source=Source())

    def send(self) -> None:
        """One publication; returns when all workers have the bytes."""
        self._engine.send_weights()

    def close(self) -> None:
        self._engine.shutdown()


class IpcSender:
    """Exports CUDA handles of full tensors to a file that workers on the same GPU open; one sender a trainer rank."""

    def __init__(self, rendezvous: Rendezvous, rank: int, fresh: Callable[[], Iterator[tuple[str, "Tensor"]]]) -> None:
        """`fresh`: a new pass over the full tensors."""
        self._fresh = fresh
        self._path = Path(rendezvous.path) / f"rank{rank}.handles"
        self._kept: list[Tensor] = []

    def send(self) -> None:
        """Write the handles. The tensors stay alive, unchanged, until the next call or `close`: engines read them in
        `apply`."""
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        kept = [(name, tensor.detach().contiguous()) for name, tensor in self._fresh()]
        handles: dict[str, dict[str, Any]] = {}
        for name, tensor in kept:
            uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
            handles[name] = {uuid: reduce_tensor(tensor)[1]}
        torch.cuda.synchronize()
        temporary = self._path.with_suffix(".part")
        temporary.write_bytes(pickle.dumps(handles))
        temporary.replace(self._path)
        self._kept = [tensor for _, tensor in kept]

    def close(self) -> None:
        self._kept = []
        self._path.unlink(missing_ok=True)
