"""What of the GPU transports can be checked without a GPU: names, arguments, refusals; and, marked gpu, a transfer for
real."""

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engines.vllm.transfer import (
    IpcSender,
    NcclSender,
    Rendezvous,
    announced,
    check_transport,
    init_info,
    receive_into,
    update_info,
)
from rollout.errors import EngineError, UserError
from rollout.types.weights import Canary, PolicyVersion, TensorEntry, Transport, WeightManifest

NCCL = Rendezvous(transport=Transport.NCCL, host="10.0.0.1", port=4711, world_size=5)
ENTRIES = (
    TensorEntry(name="a", dtype="BF16", shape=(2, 3), sha256="0" * 64),
    TensorEntry(name="b", dtype="F32", shape=(4,), sha256="1" * 64),
)


def manifest(transport: Transport, location: str) -> WeightManifest:
    canary = Canary(token_ids=np.zeros(2, dtype=np.int32), logprobs=np.zeros(1, dtype=np.float32))
    return WeightManifest(
        policy=PolicyVersion(1, 1),
        transport=transport,
        location=location,
        tensors=ENTRIES,
        digest="",
        canary=canary,
        num_bytes=28,
    )


def test_a_rendezvous_survives_the_manifest():
    for rendezvous in (NCCL, Rendezvous(transport=Transport.IPC, path="/run/weights")):
        assert Rendezvous.parse(rendezvous.location) == rendezvous


@pytest.mark.parametrize(
    "location",
    [
        "",
        "/a/directory",
        "nccl://host?world_size=2",
        "nccl://host:1",
        "nccl://host:1?world_size=1",
        "tcp://host:1?world_size=2",
        "ipc://",
    ],
)
def test_any_other_location_is_refused(location: str):
    with pytest.raises(UserError, match="world_size=N"):
        Rendezvous.parse(location)


@pytest.mark.parametrize("transport", [Transport.NCCL, Transport.IPC])
def test_a_gpu_transport_on_cpu_is_refused_with_the_cure(transport: Transport):
    with pytest.raises(UserError, match=r'set weights\.transport = "disk"'):
        check_transport(manifest(transport, NCCL.location), on_cpu=True)
    check_transport(manifest(transport, NCCL.location), on_cpu=False)
    check_transport(manifest(Transport.DISK, "/x"), on_cpu=True)


def test_replicas_join_behind_the_sender_and_behind_each_other():
    assert init_info(NCCL, first_rank=0)["rank_offset"] == 1
    assert init_info(NCCL, first_rank=2) == {
        "master_address": "10.0.0.1",
        "master_port": 4711,
        "rank_offset": 3,
        "world_size": 5,
        "packed": True,
    }


def test_vllm_takes_the_arguments_that_it_is_given():
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLWeightTransferUpdateInfo

    worker = NCCLWeightTransferInitInfo(**init_info(NCCL, 0))
    sender = NCCLTrainerInitInfo(NCCL.host, NCCL.port, NCCL.world_size, rank=0)
    for wire in ("packed", "packed_buffer_size_bytes", "packed_num_buffers"):
        assert getattr(worker, wire) == getattr(sender, wire)
    update = NCCLWeightTransferUpdateInfo(**update_info(NCCL, announced(ENTRIES)))
    assert (update.names, update.dtype_names, update.shapes) == (["a", "b"], ["bfloat16", "float32"], [[2, 3], [4]])


def test_a_dtype_that_cannot_travel_is_named():
    with pytest.raises(EngineError, match="F8_E4M3"):
        update_info(NCCL, [("a", "F8_E4M3", [1])])


def test_handles_of_all_trainer_ranks_are_merged_by_gpu(tmp_path: Path):
    ipc = Rendezvous(transport=Transport.IPC, path=str(tmp_path))
    with pytest.raises(EngineError, match="must export their tensors"):
        update_info(ipc, announced(ENTRIES))
    for rank in range(2):
        (tmp_path / f"rank{rank}.handles").write_bytes(
            pickle.dumps({name: {f"gpu-{rank}": (name, rank)} for name in ("a", "b")})
        )
    assert update_info(ipc, announced(ENTRIES))["ipc_handles"] == [
        {"gpu-0": (name, 0), "gpu-1": (name, 1)} for name in ("a", "b")
    ]


@dataclass
class Receiver:
    """Stands for vLLM's transfer engine: hands two batches to whatever is its target."""

    model: Any = "the model"
    model_config: Any = "its config"
    seen: list[dict[str, Any]] = field(default_factory=list)

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        self.model, self.model_config = model, model_config

    def update_weights(self, info: dict[str, Any]) -> None:
        self.seen.append(info)
        self.model.load_weights([("a", torch.ones(1))])
        if info.get("broken"):
            raise RuntimeError("the sender went away")
        self.model.load_weights([("b", torch.ones(2))])


def test_received_batches_pass_through_our_hands_and_the_target_is_put_back():
    receiver, taken = Receiver(), list[str]()
    receive_into(receiver, {"x": 1}, lambda weights: taken.extend(name for name, _ in weights))  # pyright: ignore[reportArgumentType]
    assert (taken, receiver.model, receiver.seen) == (["a", "b"], "the model", [{"x": 1}])
    with pytest.raises(RuntimeError):
        receive_into(receiver, {"broken": True}, lambda weights: taken.extend(name for name, _ in weights))  # pyright: ignore[reportArgumentType]
    assert (taken, receiver.model) == (["a", "b", "a"], "the model")


@pytest.mark.gpu
def test_ipc_handles_can_be_exported(tmp_path: Path):
    tensors = [("a", torch.ones(2, 3, device="cuda", dtype=torch.bfloat16)), ("b", torch.ones(4, device="cuda"))]
    sender = IpcSender(Rendezvous(transport=Transport.IPC, path=str(tmp_path)), rank=0, fresh=lambda: iter(tensors))
    sender.send()
    handles = update_info(Rendezvous(transport=Transport.IPC, path=str(tmp_path)), announced(ENTRIES))["ipc_handles"]
    assert len(handles) == 2
    sender.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: a sender and a worker")
def test_a_sender_reaches_a_receiver_over_nccl():
    import socket
    from threading import Thread

    from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = Rendezvous(transport=Transport.NCCL, host="127.0.0.1", port=port, world_size=2)
    got: dict[str, torch.Tensor] = {}

    def receive() -> None:
        torch.cuda.set_device(1)
        group = stateless_init_process_group("127.0.0.1", port, 1, 2, device=1)
        shapes = iter([("a", ([2, 3], torch.bfloat16)), ("b", ([4], torch.float32))])
        device = torch.device("cuda:1")
        packed_nccl_broadcast_consumer(
            iterator=shapes, group=group, src=0, post_unpack_func=lambda batch: got.update(dict(batch)), device=device
        )

    receiver = Thread(target=receive)
    receiver.start()
    tensors = {
        "a": torch.full((2, 3), 2.0, device="cuda:0", dtype=torch.bfloat16),
        "b": torch.arange(4.0, device="cuda:0"),
    }
    sender = NcclSender(rendezvous, ENTRIES, 0, lambda: iter(tensors.items()))
    sender.send()
    receiver.join(60)
    assert all(torch.equal(got[name].cpu(), tensor.cpu()) for name, tensor in tensors.items())
