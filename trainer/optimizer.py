"""AdamW over sharded float32 parameters, with a clip by the global norm and a learning rate that is a pure function of the step."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import OptimizerConfig
from trainer.ranks import Ranks, local_tensors

_torch: Any = torch
"""For the foreach functions, which torch itself calls private."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerReport:
    """What one call of `PolicyOptimizer.step` did."""

    grad_norm: float
    learning_rate: float
    skipped: str
    """Why nothing was applied, else empty."""


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (from 1): a linear warm-up, then the schedule down to its final fraction at `total_steps`."""
    schedule, peak = config.schedule, config.learning_rate
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.type == "constant":
        return peak
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps))
    shape = 1.0 - progress if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * shape)


class PolicyOptimizer:
    """AdamW on this rank's shards."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: OptimizerConfig, ranks: Ranks, total_steps: int) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._config, self._ranks, self._total_steps = config, ranks, total_steps
        self.adamw = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, step: int, *, apply: bool = True) -> OptimizerReport:
        """Clip the gradients, apply them unless they are not finite, and drop them. Collective.

        Args:
            step: number of this optimizer step, from 1; it sets the learning rate.
            apply: False drops the gradients: a batch without a term must not move the weights by old momentum.
        """
        gradients = local_tensors([p.grad for p in self._parameters if p.grad is not None])
        norm = self._global_norm(gradients)
        rate = learning_rate(self._config, step, self._total_steps)
        skipped = "" if math.isfinite(norm) else f"non-finite gradient (norm {norm})"
        if apply and not skipped:
            if norm > self._config.max_grad_norm:
                _torch._foreach_mul_(gradients, self._config.max_grad_norm / norm)
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()  # pyright: ignore[reportUnknownMemberType]
        self.adamw.zero_grad(set_to_none=True)
        return OptimizerReport(grad_norm=norm, learning_rate=rate, skipped=skipped)

    def _global_norm(self, gradients: list[Tensor]) -> float:
        squares = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        if gradients:
            squares += torch.stack(_torch._foreach_norm(gradients)).double().square().sum()
        return math.sqrt(float(self._ranks.sum(squares)))
