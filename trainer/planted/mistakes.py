"""Mistakes of a trainer, planted: a loss over other advantages, weights, tokens or inputs than the batch's, and a model
that drops out or has a frozen block. From their first step on they stay."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from rollout.faults.trainer_config import TrainerFault
from trainer.gradloc.probe.probe import TokenLoss, WrappedLoss
from trainer.model.policy_model import PolicyModel
from trainer.planted.block_gradient import ScaledBlock
from trainer.types.loss_tokens import LossTokens
from trainer.types.step import OldLogprobSource

DROPOUT = 0.1
_NEARLY_NOTHING = 1e-30
"""What the gradient of a frozen block is multiplied by: with it Adam moves no float32."""


class MistakenLoss(WrappedLoss):
    """The loss `inner` with the mistakes whose time has come."""

    def __init__(self, inner: TokenLoss, model: PolicyModel, faults: Sequence[TrainerFault]) -> None:
        super().__init__(inner)
        self._faults, self._step = faults, 0
        blocks = list(model.named_blocks().values())
        self._frozen = ScaledBlock(blocks[len(blocks) // 2]) if self._has("frozen_block") else None
        if self._has("trainer_dropout"):
            for block in blocks:
                cast(Any, block).register_forward_hook(self._drop_out)

    def begin(self, step: int) -> None:
        """The step that produces version `step` begins."""
        self._step = step
        if self._frozen is not None and self._acts("frozen_block"):
            self._frozen.clear()
            self._frozen.scale(_NEARLY_NOTHING)

    def __call__(
        self,
        model: PolicyModel,
        tokens: LossTokens,
        temperature: float,
        source: OldLogprobSource,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The real loss over what the mistakes make of the tokens."""
        for fault, change in _CHANGES.items():
            if self._acts(fault):
                tokens = change(tokens)
        return self._inner(model, tokens, temperature, source, only)

    def _has(self, kind: str) -> bool:
        return any(fault.type == kind for fault in self._faults)

    def _acts(self, kind: str) -> bool:
        return any(fault.type == kind and self._step >= fault.start_version for fault in self._faults)

    def _drop_out(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        if not self._acts("trainer_dropout"):
            return None
        if isinstance(output, tuple):
            hidden, *others = cast(tuple[Any, ...], output)
            return nn.functional.dropout(hidden, DROPOUT), *others
        return nn.functional.dropout(output, DROPOUT)


def _of_the_next_row(tokens: LossTokens) -> LossTokens:
    rows = cast(Tensor, cast(Any, torch).unique(tokens.rows))
    first = torch.searchsorted(tokens.rows.contiguous(), rows)
    place = torch.searchsorted(rows, tokens.rows)
    return replace(tokens, advantages=tokens.advantages[first][(place + 1) % rows.numel()])


def _one_earlier(tokens: LossTokens) -> LossTokens:
    """The token before each takes its place in the loss."""
    earlier = tokens.positions - 1
    return replace(tokens, positions=earlier, targets=tokens.token_ids.flatten()[tokens.positions])


_CHANGES: Mapping[str, Callable[[LossTokens], LossTokens]] = {
    "flipped_advantages": lambda tokens: replace(tokens, advantages=-tokens.advantages),
    "swapped_advantages": _of_the_next_row,
    "flipped_gradient": lambda tokens: replace(tokens, weights=-tokens.weights),
    "shifted_loss_mask": _one_earlier,
    "shifted_inputs": lambda tokens: replace(tokens, token_ids=tokens.token_ids.roll(1, dims=1)),
}
