"""The trainer's ranks: their process group, their device, and how a model is sharded over them. It knows no batch and
no file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from rollout.errors import ConcordError, UserError
from trainer.config.trainer import TrainerConfig
from trainer.model.policy_model import PolicyModel

_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the trainer's ranks."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def first(self) -> bool:
        """Whether this rank writes what all share."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place. Collective."""
        if self.world > 1:
            cast(Any, dist).all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def totals(self, numbers: Sequence[float]) -> list[float]:
        """Sum of each number over all ranks, in one small reduction of doubles. Collective."""
        return cast(Any, self.sum(torch.tensor(numbers, dtype=torch.float64, device=self.device))).tolist()

    def agree(self, error: str = "") -> None:
        """Meet all ranks; raise on every one of them if any has failed, so that none waits for a rank that is gone.
        Collective.

        Raises:
            ConcordError: with the messages of those that failed.
        """
        messages: list[str] = [error]
        if self.world > 1:
            messages = [""] * self.world
            cast(Any, dist).all_gather_object(messages, error)
        failed = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message]
        if failed:
            raise ConcordError("; ".join(failed))

    def gathered(self, values: tuple[Answer, ...]) -> tuple[Answer, ...]:
        """The values of all ranks, in their order. Collective."""
        if self.world == 1:
            return values
        parts: list[Any] = [None] * self.world
        cast(Any, dist).all_gather_object(parts, values)
        return tuple(value for part in parts for value in part)

    def of_first(self, act: Callable[[], Answer]) -> Answer | None:
        """Do something on rank 0, and learn on all whether it worked; None on the others. Collective.

        Raises:
            ConcordError: it did not.
        """
        try:
            answer = act() if self.first else None
        except ConcordError as error:
            if self.world > 1:
                self.agree(str(error))
            raise
        self.agree()
        return answer


def join_ranks(config: TrainerConfig, rank: int, init_method: str) -> Ranks:
    """Start the process group (gloo for CPU tensors and objects, NCCL for GPU tensors). Collective.

    Raises:
        UserError: this process already belongs to a group, or the rank is not one of `config.ranks`.
    """
    if not 0 <= rank < config.ranks:
        raise UserError(f"got trainer rank {rank} of {config.ranks}; ranks count from 0")
    if dist.is_initialized():
        raise UserError(
            "this process already runs a trainer rank; close it first, or start the other one in a process of its own"
        )
    torch.set_num_threads(config.threads)
    cuda = config.num_gpus > 0
    if cuda and not torch.cuda.is_available():
        raise UserError(
            f"got trainer.num_gpus = {config.num_gpus} but this process sees no GPU; set it to 0 or start the trainer "
            "where there is one"
        )
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=config.ranks, timeout=_COLLECTIVE_TIMEOUT
    )
    return Ranks(rank=rank, world=config.ranks, device=device, mesh=init_device_mesh(device.type, (config.ranks,)))


def leave_ranks() -> None:
    """End the process group of this process; a second call does nothing."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard_model(model: PolicyModel, ranks: Ranks, dtype: torch.dtype) -> PolicyModel:
    """Shard every block and the root (embedding, final norm, head) over the ranks; gradients are summed over them, not
    averaged.

    Parameters stay in their own dtype (float32 masters); `dtype` is that of the gathered copies that compute.
    """
    policy = (
        MixedPrecisionPolicy()
        if dtype == torch.float32
        else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    )
    # Alone there is nothing to free after forward.
    reshard = ranks.world > 1
    for block in model.blocks():
        fully_shard(block, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=reshard)
    # The root is used again at once in backward; a frozen model has none and would stay gathered.
    frozen = not any(parameter.requires_grad for parameter in model.parameters())
    fully_shard(model, mesh=ranks.mesh, mp_policy=policy, reshard_after_forward=reshard and frozen)
    sum_gradients(model)
    register_fsdp_forward_method(model, "head_gap")
    return model


def sum_gradients(model: nn.Module) -> None:
    """Gradients of a sharded model are summed over ranks, not averaged: so token gradients are additive, whatever the
    number of ranks."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # Each unit has its own setting; the root's does not reach the others.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters: after a forward without a backward they would stay, and hide the shards from
    whoever asks for parameters."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def local_tensors(parameters: Sequence[nn.Parameter | Tensor]) -> list[Tensor]:
    """This rank's part of each sharded tensor, sharing its memory."""
    return [local_tensor(parameter) for parameter in parameters]


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, or the tensor itself."""
    return cast(Tensor, cast(Any, tensor).to_local()) if isinstance(tensor, DTensor) else tensor
