"""Muon: steps along the orthogonalised momentum of matrices. It knows no model: its caller says which parameters are
matrices.

Source: Jordan et al., *Muon: An optimizer for hidden layers in neural networks*, 2024 (iteration and its coefficients);
Liu et al., *Muon is Scalable for LLM
Training*, 2025 (weight decay, scale that matches AdamW's).
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rollout.errors import UserError
from trainer.model.ranks import local_tensor
from trainer.model.tensor_norms import squared_norms

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7

Scale = Literal["match_rms", "original"]


def newton_schulz(matrices: Tensor, iterations: int = ITERATIONS) -> Tensor:
    """Drive the singular values of a matrix, or of each of a stack [number, rows, columns], at most 1 before, towards
    1.

    x becomes a x + (b A + c A A) x with A = x x^T. Five iterations leave them between 0.7 and 1.2; they do not
    converge.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    add_product = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(iterations):
        square = x @ x.mT
        x = add_product(x, add_product(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalised(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix, or the stack of them, with its singular vectors and singular values near 1; computed in `dtype`,
    returned in the dtype of `matrices`."""
    stack = matrices if matrices.ndim == 3 else matrices[None]
    squares = squared_norms(list(stack.unbind())).to(matrices.device)
    norms = squares.sqrt().to(matrices.dtype).reshape(*matrices.shape[:-2], 1, 1)
    return newton_schulz((matrices / norms.clamp(min=_EPSILON)).to(dtype)).to(matrices.dtype)


def step_scale(rows: int, columns: int, scale: Scale) -> float:
    """Factor of the learning rate for matrices of this shape: `match_rms` gives updates the root mean square of
    AdamW's, so both take one rate."""
    return 0.2 * math.sqrt(max(rows, columns)) if scale == "match_rms" else math.sqrt(max(1.0, rows / columns))


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; decoupled weight decay.

    A parameter is a matrix, or a stack of matrices [number, rows, columns] (the experts of one block), each
    orthogonalised alone. A sharded matrix is gathered, one at a time, and every rank orthogonalises the whole and keeps
    its rows: memory of one full matrix and its work on every rank. A stack that is sharded along its first dimension
    stays where it is.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        scale: Scale = "match_rms",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`dtype` is that of Newton-Schulz; bfloat16 as published.

        Raises:
            UserError: a parameter has other than two or three dimensions.
        """
        held = list(parameters)
        for parameter in held:
            if parameter.ndim not in (2, 3):
                raise UserError(
                    f"got a parameter of shape {tuple(parameter.shape)} for Muon, expected a matrix or a stack of "
                    "matrices; give it to AdamW instead"
                )
        self._dtype = dtype
        self._scale: Scale = scale
        super().__init__(held, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every parameter that has a gradient. Collective when parameters are sharded."""
        for group in self.param_groups:
            for parameter in cast(list[nn.Parameter], group["params"]):
                if parameter.grad is not None:
                    self._move(
                        parameter,
                        parameter.grad,
                        float(group["lr"]),
                        float(group["momentum"]),
                        float(group["weight_decay"]),
                    )

    def _move(
        self, parameter: nn.Parameter, gradient: Tensor, rate: float, momentum: float, weight_decay: float
    ) -> None:
        state: dict[str, Any] = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(gradient)
        average = local_tensor(state["momentum"]).lerp_(local_tensor(gradient), 1.0 - momentum)
        direction = self._direction(local_tensor(gradient).lerp(average, momentum), gradient)
        local = local_tensor(parameter).mul_(1.0 - rate * weight_decay)
        local.add_(
            direction.to(local.dtype), alpha=-rate * step_scale(parameter.shape[-2], parameter.shape[-1], self._scale)
        )

    def _direction(self, local: Tensor, like: Tensor) -> Tensor:
        """This rank's part of the orthogonalised matrices whose part it holds, laid out as `like`."""
        apart = isinstance(like, DTensor) and any(
            placement.is_shard() and not (like.ndim == 3 and placement.is_shard(0)) for placement in like.placements
        )
        if not apart or not isinstance(like, DTensor):
            return orthogonalised(local, self._dtype)
        whole: Tensor = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        ).full_tensor()
        # Every rank has the whole, so nothing is sent: each takes its own part.
        return local_tensor(
            distribute_tensor(orthogonalised(whole, self._dtype), like.device_mesh, like.placements, src_data_rank=None)
        )
