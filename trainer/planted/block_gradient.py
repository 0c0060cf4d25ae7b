"""Scales the gradient of one transformer block in every backward pass, and of nothing else."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from rollout.errors import UserError


class ScaledBlock:
    """Hooks round a block: what flows back into its output is multiplied, and what leaves it at its input is divided
    again.

    So the gradients of its own parameters carry the factor, those of all others do not, and whoever runs a backward
    pass sees it.
    """

    def __init__(self, block: nn.Module) -> None:
        self.factor = 1.0
        """1 leaves every pass as it is."""
        hooked = cast(Any, block)
        hooked.register_forward_pre_hook(self._before, with_kwargs=True)
        hooked.register_forward_hook(self._behind)

    def scale(self, factor: float) -> None:
        self.factor *= factor

    def clear(self) -> None:
        self.factor = 1.0

    def _before(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.factor == 1.0:
            return None
        if args:
            return (scaled_backward(args[0], 1.0 / self.factor), *args[1:]), kwargs
        if "hidden_states" not in kwargs:
            raise UserError(
                f"fault block_explosion finds no hidden states among the inputs of {type(block).__name__}; plant "
                "another fault"
            )
        return args, {**kwargs, "hidden_states": scaled_backward(kwargs["hidden_states"], 1.0 / self.factor)}

    def _behind(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        if self.factor == 1.0:
            return None
        if isinstance(output, tuple):
            hidden, *others = cast(tuple[Any, ...], output)
            return scaled_backward(hidden, self.factor), *others
        return scaled_backward(output, self.factor)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, factor: float) -> Tensor:  # noqa: ANN401
        ctx.factor = factor
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ANN401
        return grads[0] * ctx.factor, None


def scaled_backward(values: Tensor, factor: float) -> Tensor:
    """The same values; their gradient is multiplied by `factor`."""
    return cast(Tensor, cast(Any, _Scaled).apply(values, factor))
