"""Measures gradients of chosen token terms of a live FSDP2 step, and leaves no trace. Layer 3 of diagnosis. It knows no
search and no optimizer.

Inside `with probe:` the step's gradient is set aside and every parameter's `.grad` is the probe's; afterwards the very
same tensors are back, and so is the random state. In memory: the step's gradient and the probe's, both sharded.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from rollout.errors import UserError
from trainer.gradloc.probe.random_states import RandomState
from trainer.gradloc.probe.step_terms import StepTerms, Terms
from trainer.gradloc.probe.term_rows import Pass, RowsConfig, num_passes, rank_passes
from trainer.loss.policy_loss import loss_tokens
from trainer.model.blocks import named_blocks, num_replicas
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, local_tensor, reshard
from trainer.model.tensor_norms import squared_norms
from trainer.types.loss_tokens import LossTokens
from trainer.types.step import MicroBatch, OldLogprobSource

_SLICE = 1 << 20
"""Numbers of a gradient that a difference takes at a time."""


class TokenLoss(Protocol):
    """A loss that is a sum of weighted token terms, as `trainer.loss.policy_loss.PolicyLoss`."""

    @property
    def couples_tokens(self) -> bool:
        """Whether a term depends on which other tokens of its sequence are in the loss."""
        ...

    @property
    def sums(self) -> tuple[str, ...]:
        """Names of the entries of the vector that comes with the loss, where a step adds them up; else empty."""
        ...

    def __call__(
        self,
        model: PolicyModel,
        tokens: LossTokens,
        temperature: float,
        source: OldLogprobSource,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The scalar loss with its graph, and anything; with `only`, of the terms at these indices alone."""
        ...


class WrappedLoss:
    """What a loss that stands before `inner` says of itself: what `inner` says."""

    def __init__(self, inner: TokenLoss) -> None:
        self._inner = inner

    @property
    def couples_tokens(self) -> bool:
        """As the real loss."""
        return self._inner.couples_tokens

    @property
    def sums(self) -> tuple[str, ...]:
        """As the real loss."""
        return self._inner.sums


Context = Callable[[MicroBatch], AbstractContextManager[Any]]
"""Forward and backward of a micro-batch run inside it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepData:
    """What this rank's step ran on."""

    micro_batches: Sequence[MicroBatch]
    temperature: float = 1.0
    source: OldLogprobSource = OldLogprobSource.ROLLOUT
    random_states: Sequence[RandomState] = ()
    """State before the forward pass of each micro-batch; needed where the model draws random numbers."""
    context: Context | None = None


class GradientProbe:
    """A `StepProbe` over one step. Every method but `cost` and `rest_cost` is collective."""

    def __init__(
        self,
        model: PolicyModel,
        loss: TokenLoss,
        ranks: Ranks,
        step: StepData,
        table: StepTerms,
        *,
        eps: float,
        cut: bool = True,
    ) -> None:
        """`eps` is that of the dtype which computes.

        Raises:
            UserError: the model has dropout and the step's random states are not there.
        """
        self._model, self._loss, self._ranks, self._step, self._table, self.eps = model, loss, ranks, step, table, eps
        self._blocks = named_blocks(model)
        self._parameters = [parameter for block in self._blocks for parameter in block.parameters]
        self._block_of = np.repeat(np.arange(len(self._blocks)), [len(block.parameters) for block in self._blocks])
        self._replicas = np.array([num_replicas(parameter, ranks.world) for parameter in self._parameters])
        random = draws_random_numbers(model)
        if random and len(step.random_states) != len(step.micro_batches):
            raise UserError(
                f"the model has dropout, and {len(step.random_states)} random states came for {len(step.micro_batches)}"
                " micro-batches; take `RandomState.take(device)` before each micro-batch's forward pass and hand them "
                "over, or set dropout to 0"
            )
        self._rows = RowsConfig(whole=random, coupled=loss.couples_tokens, cut=cut)
        self._aside: list[Tensor | None] = []
        self._random: RandomState | None = None
        self._last: Terms | None = None
        self._losses: list[Tensor] = []
        self.tokens_forwarded = 0
        """On this rank, padding included."""
        self.leaf_blocks: dict[int, tuple[tuple[str, float], ...]] = {}
        """(block, norm) of every term whose gradient was measured alone."""

    def __enter__(self) -> Self:
        self._aside = [parameter.grad for parameter in self._parameters]
        self._random = RandomState.take(self._ranks.device)
        self._drop()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            reshard(self._model)  # an interrupted pass leaves parameters gathered
        for parameter, gradient in zip(self._parameters, self._aside, strict=True):
            parameter.grad = gradient
        self._aside, self._last = [], None
        if self._random is not None:
            self._random.put_back(self._ranks.device)

    def cost(self, terms: Terms) -> int:
        return num_passes(terms, self._table, self._rows)

    def norm(self, terms: Terms) -> float:
        """L2 norm of the gradient of these terms, over all ranks; NaN where it or their loss is not finite. That of no
        terms is 0, without a pass."""
        self._drop()
        if not terms.size:
            self._last = terms
            return 0.0
        self._losses.clear()
        for one in rank_passes(terms, self._table, self._rows, self._ranks.rank, self._step.micro_batches):
            self._run(one)
        self._last = terms
        there = {index: gradient for index, gradient in enumerate(self._now()) if gradient is not None}
        squares = squared_norms(list(there.values()))
        blocks, total = self._reduced(list(there), squares, float(torch.stack(self._losses).sum()))
        if terms.size == 1:
            names = (block.name for block in self._blocks)
            self.leaf_blocks[int(terms[0])] = tuple(zip(names, map(math.sqrt, blocks), strict=True))
        return total

    def rest(self, terms: Terms) -> float:
        """|step's gradient - gradient of these terms|."""
        if not self._measured_last(terms):
            self.norm(terms)
        pairs = enumerate(zip(_local(self._aside), self._now(), strict=True))
        found = {index: _squared_difference(*pair) for index, pair in pairs if any(part is not None for part in pair)}
        return self._reduced(list(found), torch.stack(list(found.values())) if found else torch.zeros(0))[1]

    def rest_cost(self, terms: Terms) -> int:
        return 0 if self._measured_last(terms) else self.cost(terms)

    def _measured_last(self, terms: Terms) -> bool:
        return self._last is not None and np.array_equal(self._last, terms)

    def _drop(self) -> None:
        self._last = None
        for parameter in self._parameters:
            parameter.grad = None

    def _run(self, one: Pass) -> None:
        micro = one.rows
        if self._rows.whole and one.source is not None:
            self._step.random_states[one.source].put_back(self._ranks.device)
        only = None
        if one.chosen is not None:
            only = torch.as_tensor(np.flatnonzero(one.chosen[micro.loss_mask]), device=self._ranks.device)
        context = nullcontext() if self._step.context is None else self._step.context(micro)
        with torch.enable_grad(), context:
            tokens = loss_tokens(micro, self._ranks.device)
            loss, _ = self._loss(self._model, tokens, self._step.temperature, self._step.source, only)
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
        self._losses.append(loss.detach())
        self.tokens_forwarded += micro.token_ids.size

    def _now(self) -> list[Tensor | None]:
        return _local([parameter.grad for parameter in self._parameters])

    def _reduced(self, there: list[int], own: Tensor, loss: float = 0.0) -> tuple[list[float], float]:
        """Squared norm of each block and norm of all over all ranks, from this rank's squared norms of some parameters;
        what is replicated counts once.

        Args:
            loss: this rank's; where the sum is not finite, neither is the norm of all.
        """
        squares = np.zeros(len(self._parameters))
        if there:
            squares[there] = own.cpu().numpy()
        sums = np.bincount(self._block_of, weights=squares / self._replicas, minlength=len(self._blocks))
        *blocks, whole_loss = self._ranks.totals((*sums, loss))
        finite = all(math.isfinite(number) for number in (*blocks, whole_loss))
        return blocks, math.sqrt(math.fsum(blocks)) if finite else math.nan


def _local(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """This rank's part of each parameter's gradient."""
    return [None if gradient is None else local_tensor(gradient) for gradient in gradients]


def _squared_difference(one: Tensor | None, other: Tensor | None) -> Tensor:
    """A slice at a time, so that no third copy exists."""
    if one is None or other is None:
        return squared_norms([part for part in (one, other) if part is not None]).sum()
    mine, theirs = one.reshape(-1), other.reshape(-1)
    slices = [slice(start, start + _SLICE) for start in range(0, mine.numel(), _SLICE)] or [slice(0, 0)]
    return torch.cat([squared_norms([mine[part] - theirs[part]]) for part in slices]).sum()


def draws_random_numbers(model: nn.Module) -> bool:
    """Whether a forward pass of this model depends on the random state: dropout in training mode."""
    rates = ("p", "attention_dropout", "dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop")
    return any(
        isinstance(rate := getattr(module, name, None), float) and rate > 0
        for module in model.modules()
        if module.training
        for name in rates
    )
