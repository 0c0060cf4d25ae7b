"""The blocks of a model by name, and L2 norms of what belongs to them, over all ranks. It knows no clip and no loss."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rollout.errors import ConcordError
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import local_tensor
from trainer.model.tensor_norms import squared_norms

EMBEDDINGS, HEAD, TIED = "embeddings", "head", "embeddings_and_head"
"""Names of what is outside the transformer blocks: before them, behind them (final norm included), or all of it where
the two share a weight."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Parameters that one history stands for; each parameter that takes a gradient is in exactly one block."""

    name: str
    """Path of the transformer block in the model (`model.layers.0`), or one of `EMBEDDINGS`, `HEAD`, `TIED`."""
    parameters: tuple[nn.Parameter, ...]


def named_blocks(model: PolicyModel) -> tuple[Block, ...]:
    """Every transformer block in order, with what is before them first and what is behind them last; sharded or not.

    Raises:
        UserError: the architecture does not say what its blocks are.
    """
    blocks = model.named_blocks()
    taken: set[int] = set()
    inner = [Block(name=name, parameters=_new(module, taken)) for name, module in blocks.items()]
    before, behind, reached = list[nn.Parameter](), list[nn.Parameter](), False
    for path, parameter in model.causal_lm.named_parameters():
        if id(parameter) in taken or not parameter.requires_grad:
            reached = reached or any(path.startswith(f"{name}.") for name in blocks)
        else:
            (behind if reached else before).append(parameter)
    causal_lm = cast(Any, model.causal_lm)
    first, last = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    if last is not None and first.weight is last.weight:
        inner.insert(0, Block(name=TIED, parameters=(*before, *behind)))
    else:
        inner = [Block(name=EMBEDDINGS, parameters=tuple(before)), *inner, Block(name=HEAD, parameters=tuple(behind))]
    return tuple(block for block in inner if block.parameters)


def gradients_of(blocks: Sequence[Block]) -> list[list[Tensor]]:
    """The gradients of each block, as they are sharded; a parameter without one is left out."""
    return [[parameter.grad for parameter in block.parameters if parameter.grad is not None] for block in blocks]


def block_norms(tensors: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[float, ...]:
    """[blocks] L2 norm of all tensors of each block. Collective: one reduction for all blocks that are sharded alike.

    Sums run over the ranks that hold different parts of a tensor, and over no others: what is replicated, wholly or
    along one dimension of an HSDP mesh, counts once. Squares are summed in float64 and in a fixed order, so that the
    result is the same on all ranks and, up to rounding, for any number of them.

    Args:
        device: of the ranks' tensors; a block without a tensor has norm 0.

    Raises:
        ConcordError: a tensor is a sum that its ranks have not built yet.
    """
    flat = [(block, tensor) for block, parts in enumerate(tensors) for tensor in parts]
    squares: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}
    for groups in dict.fromkeys(_shard_groups(tensor) for _, tensor in flat):
        alike = [(block, local_tensor(tensor)) for block, tensor in flat if _shard_groups(tensor) == groups]
        own = squared_norms([tensor for _, tensor in alike])
        members = Counter(block for block, _ in alike)
        parts = cast(tuple[Tensor, ...], cast(Any, own).split([members[block] for block in range(len(tensors))]))
        # No scatter: its order of additions is not fixed on a GPU.
        sums = torch.stack([part.sum() for part in parts])
        for group in groups:
            cast(Any, dist).all_reduce(sums, group=group)
        squares[groups] = sums
    total = sum(squares.values(), torch.zeros(len(tensors), dtype=torch.float64, device=device))
    return tuple(math.sqrt(square) for square in cast(list[float], cast(Any, total).tolist()))


def num_replicas(parameter: nn.Parameter, world: int) -> int:
    """Ranks of `world` that hold the same part of a parameter: all of them unless it is sharded."""
    if not isinstance(parameter, DTensor):
        return world
    mesh: Any = parameter.device_mesh
    shards = math.prod(
        mesh.size(dimension) for dimension, placement in enumerate(parameter.placements) if placement.is_shard()
    )
    return world // shards


def _new(module: nn.Module, taken: set[int]) -> tuple[nn.Parameter, ...]:
    found = tuple(
        parameter for parameter in module.parameters() if parameter.requires_grad and id(parameter) not in taken
    )
    taken.update(id(parameter) for parameter in module.parameters())
    return found


def _shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks, one a mesh dimension, over which the parts of a tensor add up to the whole."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh: Any = tensor.device_mesh
    groups: list[dist.ProcessGroup] = []
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ConcordError(
                "got a tensor whose ranks hold summands, expected shards; reduce it before its norm is asked for"
            )
        if placement.is_shard() and mesh.size(dimension) > 1:
            groups.append(mesh.get_group(dimension))
    return tuple(groups)
