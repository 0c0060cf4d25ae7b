"""Whether an optimizer's next update can leave a parameter that is not finite, known before it is applied. Layer 3 of
diagnosis.

An update in place cannot be taken back without a copy of everything, so it is bounded instead: from the norms of
parameters and moments as they stand, of the clipped gradient and of the learning rate follows the largest value that
any parameter can have afterwards. A refusal changes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.model.ranks import Ranks, local_tensor
from trainer.model.tensor_norms import squared_norms

LARGEST = float(torch.finfo(torch.float32).max) / 4
"""Bounds stay a little below what float32 holds, for the rounding on the way."""
_MOMENTS = ("exp_avg", "momentum")
_SQUARES = ("exp_avg_sq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBound:
    """What an update starts from, as L2 norms over everything: no single value is larger."""

    parameters: float
    moments: float
    squares: float
    gradient: float
    """After the clip."""
    rate: float

    def refusal(self, group: dict[str, Any], largest_matrix: int) -> str:
        """Why the update of one parameter group cannot be applied; empty where every value stays finite.

        Args:
            group: of torch's AdamW or of `trainer.optim.muon.Muon`.
            largest_matrix: numbers in its largest parameter.
        """
        for name, norm in (
            ("parameters", self.parameters),
            ("optimizer state", self.moments),
            ("optimizer state", self.squares),
        ):
            if not math.isfinite(norm):
                return f"non-finite {name} (norm {norm:g})"
        decayed = self.parameters * (1.0 + self.rate * float(group["weight_decay"]))
        if "betas" in group:
            first = float(group["betas"][0])
            moment = first * self.moments + (1.0 - first) * self.gradient
            moved = self.rate / (1.0 - first) * max(1.0, moment / max(float(group["eps"]), 1e-45))
        else:
            # Singular values of at most 1.2, times a scale below the square root of the longer side.
            moved = 2.0 * self.rate * math.sqrt(largest_matrix)
        worst = max(decayed + moved, self.gradient**2, float(group["weight_decay"]) * self.rate)
        return (
            ""
            if worst < LARGEST
            else f"non-finite update (a parameter could reach {worst:.3g} at learning rate {self.rate:g})"
        )


class UpdateGuard:
    """Watches the optimizers of one rank. Collective: one small reduction a step."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], ranks: Ranks) -> None:
        self._optimizers, self._ranks = tuple(optimizers), ranks

    @torch.no_grad()
    def refusal(self, rate: float, gradient_norm: float) -> str:
        """Why the next update must not be applied, the same on all ranks; empty where it may be.

        Args:
            rate: the learning rate of the update.
            gradient_norm: at most the global norm of the gradient that is applied.
        """
        parameters: list[Tensor] = []
        moments: list[Tensor] = []
        squares: list[Tensor] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in cast(list[nn.Parameter], group["params"]):
                    state = cast(dict[str, Tensor], optimizer.state.get(parameter, {}))
                    parameters.append(local_tensor(parameter))
                    moments += [local_tensor(state[name]) for name in _MOMENTS if name in state]
                    squares += [local_tensor(state[name]) for name in _SQUARES if name in state]
        sums = self._ranks.sum(
            torch.stack([_squared_norm(tensors, self._ranks.device) for tensors in (parameters, moments, squares)])
        )
        norms = [math.sqrt(square) for square in cast(list[float], cast(Any, sums).tolist())]
        bound = UpdateBound(parameters=norms[0], moments=norms[1], squares=norms[2], gradient=gradient_norm, rate=rate)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                largest = max(parameter.numel() for parameter in cast(list[nn.Parameter], group["params"]))
                if reason := bound.refusal(group, largest):
                    return reason
        return ""


def _squared_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Squared L2 norm of this rank's parts; what several ranks hold counts more than once, which only
    loosens the bound."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return squared_norms(tensors).sum()
