"""Watches a forward and backward pass for the first value that is not finite, block by block. It changes no value."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.model.blocks import EMBEDDINGS, HEAD, Block
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import local_tensor
from trainer.replay.report import ReplayPlace

LOSS = "loss"


class NonFinitePlaces:
    """Hooks on a model; they stay for its life."""

    def __init__(self, model: PolicyModel) -> None:
        self.first_forward: ReplayPlace | None = None
        """First activation that is not finite, in forward order."""
        self.first_backward: ReplayPlace | None = None
        """First place that makes a gradient that is not finite, in backward order."""
        self._micro_batch = 0
        watched: list[tuple[str, nn.Module]] = [
            (EMBEDDINGS, cast(Any, model.causal_lm).get_input_embeddings()),
            *model.named_blocks().items(),
            (HEAD, model),
        ]
        behind = [name for name, _ in watched[1:]] + [LOSS]
        for (name, module), after in zip(watched, behind, strict=True):
            module.register_forward_hook(partial(self._seen, name, after))

    def begin(self) -> None:
        self.first_forward = self.first_backward = None

    def micro_batch(self, number: int) -> None:
        self._micro_batch = number

    def see_loss(self, loss: Tensor) -> None:
        """The loss of the micro-batch, behind all blocks."""
        self._note_forward(LOSS, loss)

    def see_gradients(self, blocks: Sequence[Block]) -> None:
        """The whole gradient, for what no activation's gradient has shown: parameters of a block, the last block
        first."""
        for block in reversed(blocks):
            if self.first_backward is None and not all(
                _finite(parameter.grad) for parameter in block.parameters if parameter.grad is not None
            ):
                self.first_backward = ReplayPlace(micro_batch=self._micro_batch, block=block.name, reached=block.name)

    def _seen(
        self,
        name: str,
        after: str,
        module: nn.Module,
        args: tuple[Any, ...],
        output: Any,  # noqa: ANN401
    ) -> None:
        values = cast(Tensor, output[0] if isinstance(output, tuple) else output)
        self._note_forward(name, values)
        if values.requires_grad:
            cast(Any, values).register_hook(partial(self._note_backward, name, after))

    def _note_forward(self, name: str, values: Tensor) -> None:
        if self.first_forward is None and not _finite(values):
            self.first_forward = ReplayPlace(micro_batch=self._micro_batch, block=name)

    def _note_backward(self, name: str, after: str, gradient: Tensor) -> None:
        """The gradient of what `name` gave to `after`, which is what `after` makes of its own."""
        if self.first_backward is None and not _finite(gradient):
            self.first_backward = ReplayPlace(micro_batch=self._micro_batch, block=after, reached=name)


def _finite(values: Tensor) -> bool:
    return bool(torch.isfinite(local_tensor(values.detach())).all())
