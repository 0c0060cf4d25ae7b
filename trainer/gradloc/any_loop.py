"""What a training loop of one's own hands to GradLoc: its ranks, its rows and its loss. Layer 3 of diagnosis. It knows
no search."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from rollout.errors import UserError
from trainer.loss.policy_loss import loss_tokens
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks
from trainer.types.loss_tokens import LossTokens
from trainer.types.step import MicroBatch, OldLogprobSource


class SumOfTerms:
    """A `TokenLoss` whose terms know of no other token: the sum of weight x `terms(log-probs, tokens)`."""

    couples_tokens = False
    sums: tuple[str, ...] = ()

    def __init__(self, terms: Callable[[Tensor, LossTokens], Tensor]) -> None:
        """`terms` takes the log-probs [N] of the loss's tokens and what is known of them, and returns [N] with a
        graph."""
        self._terms = terms

    def __call__(
        self,
        model: PolicyModel,
        tokens: LossTokens,
        temperature: float,
        source: OldLogprobSource,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The scalar loss with its graph, and the log-probs."""
        logprobs, _ = model(tokens.token_ids, tokens.positions, tokens.targets, temperature, tokens.support)
        terms, weights = self._terms(logprobs, tokens), tokens.weights
        return (torch.dot(terms, weights) if only is None else torch.dot(terms[only], weights[only])), logprobs.detach()

    def of(self, model: PolicyModel, micro: MicroBatch) -> Tensor:
        """The scalar loss of a micro-batch, to call backward on."""
        return self(model, loss_tokens(micro, next(model.parameters()).device), 1.0, OldLogprobSource.ROLLOUT)[0]


def ranks_of(device: torch.device) -> Ranks:
    """The ranks of the process group that this process belongs to, all of which shard the model.

    Raises:
        UserError: there is no process group.
    """
    if not dist.is_initialized():
        raise UserError("got no process group; call torch.distributed.init_process_group first, also with one process")
    world = cast(int, cast(Any, dist).get_world_size())
    return Ranks(rank=dist.get_rank(), world=world, device=device, mesh=init_device_mesh(device.type, (world,)))


def micro_batch(
    token_ids: NDArray[np.int64],
    loss_mask: NDArray[np.bool_],
    weight: float,
    *,
    old_logprobs: NDArray[np.float32] | None = None,
    advantages: NDArray[np.float32] | None = None,
    names: tuple[str, ...] | None = None,
) -> MicroBatch:
    """Rows of tokens as the loss and the search read them.

    Args:
        token_ids: [B, T] right-padded rows.
        loss_mask: [B, T], True where the token's term is in the loss; never in column 0.
        weight: of every term, the fixed denominator of the whole step: 1/N.
        old_logprobs: [B, T] nats, of losses with a ratio; 0 where there is none.
        advantages: [B]; 1 where there is none.
        names: [B] by which a hit names its row; the row's number where there is none.

    Raises:
        UserError: shapes differ, or the first token of a row has a term, which nothing predicts.
    """
    rows, width = token_ids.shape
    zeros, ones = np.zeros((rows, width), dtype=np.float32), np.ones(rows, dtype=np.float32)
    old, each = zeros if old_logprobs is None else old_logprobs, ones if advantages is None else advantages
    shapes = (loss_mask.shape, old.shape, each.shape, (len(names or each),))
    if shapes != ((rows, width), (rows, width), (rows,), (rows,)):
        raise UserError(
            f"got loss_mask, old_logprobs, advantages and names of shapes {shapes}, expected those of token_ids "
            f"{(rows, width)} and its rows"
        )
    if loss_mask[:, 0].any():
        raise UserError("got a loss_mask that is true in column 0, which nothing predicts; set it to false there")
    lengths = width - np.argmax(loss_mask[:, ::-1], axis=1)
    return MicroBatch(
        token_ids=token_ids,
        loss_mask=loss_mask,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=np.broadcast_to(each[:, None], (rows, width)),
        token_weights=ones * np.float32(weight),
        trajectory_ids=names or tuple(str(row) for row in range(rows)),
        lengths=tuple(int(length) if mask.any() else 0 for length, mask in zip(lengths, loss_mask, strict=True)),
        routing=(None,) * rows,
    )
