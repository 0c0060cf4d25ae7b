"""AdamW, or Muon beside it, over sharded float32 parameters, behind a clip by block and one by the global norm.

The learning rate is a pure function of the step.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollout.errors import UserError
from trainer.config.trainer import AdaGCConfig, LayerClipConfig, OptimizerConfig
from trainer.model.blocks import EMBEDDINGS, HEAD, TIED, Block, block_norms, gradients_of
from trainer.model.ranks import Ranks, local_tensors
from trainer.optim.clip_registry import build_clip
from trainer.optim.clipping import ClipDecision, foresee, global_norm
from trainer.optim.muon import Muon
from trainer.optim.update_guard import UpdateGuard

_torch: Any = torch
"""For the foreach functions, which torch itself calls private."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorms:
    """Norms of one step's gradient as it stands, over all ranks."""

    blocks: tuple[float, ...]
    """L2 norm of each block, in the order of the blocks."""
    total: float
    """L2 norm of all of it; not finite where the gradient is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerReport:
    """What one call of `PolicyOptimizer.apply` or `drop` did. Pairs are (name of the block, value), in the order of the
    blocks."""

    grad_norm: float
    """Global L2 norm before any clip."""
    learning_rate: float
    skipped: str
    """Why nothing was applied, else empty."""
    block_norms: tuple[tuple[str, float], ...]
    """L2 norm of each block's gradient before any clip."""
    block_scales: tuple[tuple[str, float], ...]
    """Factor of each block's gradient by `clip`, without the global one; empty where nothing was applied."""
    block_thresholds: tuple[tuple[str, float | None], ...]
    """Norm at which `clip` clips each block; None where it has none of its own, or none yet. Empty where nothing was
    applied."""

    @property
    def applied(self) -> bool:
        """Whether the weights moved."""
        return bool(self.block_scales)


LearningRate = Callable[[int], float]
"""The rate of an optimizer step, by its number (from 1)."""


def learning_rate(config: OptimizerConfig, total_steps: int, step: int) -> float:
    """The rate of optimizer step `step` (from 1): a linear warm-up, then the schedule down to its final fraction at
    `total_steps`."""
    schedule, peak = config.schedule, config.learning_rate
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.type == "constant":
        return peak
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, total_steps - schedule.warmup_steps))
    shape = 1.0 - progress if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * shape)


def build_optimizers(
    blocks: Sequence[Block], config: OptimizerConfig, device: torch.device
) -> tuple[torch.optim.Optimizer, ...]:
    """AdamW for all parameters, or Muon for the matrices of transformer blocks and AdamW for the rest.

    Raises:
        UserError: Muon is asked for and no transformer block has a matrix that takes a gradient.
    """
    muon, adamw = list[nn.Parameter](), {True: list[nn.Parameter](), False: list[nn.Parameter]()}
    for block in blocks:
        for parameter in block.parameters:
            if config.type == "muon" and parameter.ndim > 1 and block.name not in (EMBEDDINGS, HEAD, TIED):
                muon.append(parameter)
            else:
                adamw[_decays(block, parameter, config)].append(parameter)
    if config.type == "muon" and not muon:
        raise UserError(
            'got trainer.optimizer.type = "muon" for a model without matrices in its transformer blocks; set it to'
            ' "adamw"'
        )
    built: list[torch.optim.Optimizer] = []
    if muon:
        # In bfloat16 as published where that is fast; a CPU is faster in float32.
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        settings: dict[str, Any] = {
            "momentum": config.muon_momentum,
            "weight_decay": config.weight_decay,
            "scale": config.muon_scale,
            "dtype": dtype,
        }
        built.append(Muon(muon, lr=config.learning_rate, **settings))
    groups = [
        {"params": parameters, "weight_decay": config.weight_decay if decays else 0.0}
        for decays, parameters in adamw.items()
        if parameters
    ]
    if groups:
        betas = (config.beta1, config.beta2)
        built.append(torch.optim.AdamW(groups, config.learning_rate, betas, config.epsilon, fused=True))
    return tuple(built)


def _decays(block: Block, parameter: nn.Parameter, config: OptimizerConfig) -> bool:
    """Whether weight decay acts on a parameter: on norms, biases and embeddings it only shrinks what sets a scale."""
    return config.decay == "all" or (parameter.ndim > 1 and block.name not in (EMBEDDINGS, TIED))


class PolicyOptimizer:
    """The clip and the optimizers on this rank's shards."""

    def __init__(self, blocks: Sequence[Block], config: OptimizerConfig, ranks: Ranks, rate: LearningRate) -> None:
        self._blocks = tuple(blocks)
        self._names = tuple(block.name for block in self._blocks)
        self._config, self._ranks, self._rate = config, ranks, rate
        self.clip = build_clip(config.clip, self._names, config.max_grad_norm)
        self.optimizers = build_optimizers(self._blocks, config, ranks.device)
        self._guard = UpdateGuard(self.optimizers, ranks)

    def measure(self) -> GradientNorms:
        """Norms of the gradients before any clip; they stay as they are. Collective: one small reduction."""
        norms = block_norms(gradients_of(self._blocks), self._ranks.device)
        return GradientNorms(blocks=norms, total=global_norm(norms))

    def smallest_scale(self, norms: GradientNorms) -> float:
        """By which the clip would scale a block down, the smallest of all; 1 with a clip that knows no blocks. The clip
        learns nothing from being asked."""
        if not (isinstance(self._config.clip, LayerClipConfig | AdaGCConfig) and math.isfinite(norms.total)):
            return 1.0
        return min(foresee(self.clip, norms.blocks).scales)

    def apply(self, step: int, norms: GradientNorms) -> OptimizerReport:
        """Clip the gradients, apply them unless they, the optimizer's state or a parameter would not be finite, and
        drop them. Collective.

        Args:
            step: number of this optimizer step, from 1; it sets the learning rate.
            norms: of these very gradients, from `measure`.
        """
        rate = self._rate(step)
        if not math.isfinite(norms.total):
            return self.drop(step, norms, f"non-finite gradient (norm {norms.total})")
        if refusal := self._guard.refusal(rate, min(norms.total, self._config.max_grad_norm)):
            return self.drop(step, norms, refusal)
        decision = self.clip.decide(norms.blocks)
        self._scale(gradients_of(self._blocks), norms.blocks, decision.scales)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        return self._end(step, norms, "", decision)

    def drop(self, step: int, norms: GradientNorms, skipped: str = "") -> OptimizerReport:
        """Drop the gradients: no weight moves, not even by old momentum, and the clip learns nothing. Arguments as of
        `apply`.

        Args:
            skipped: why; empty for a batch without a term, which is a step that moves nothing.
        """
        return self._end(step, norms, skipped, ClipDecision(scales=(), thresholds=()))

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _end(self, step: int, norms: GradientNorms, skipped: str, decision: ClipDecision) -> OptimizerReport:
        self.zero()
        return OptimizerReport(
            grad_norm=norms.total,
            learning_rate=self._rate(step),
            skipped=skipped,
            block_norms=tuple(zip(self._names, norms.blocks, strict=True)),
            block_scales=tuple(zip(self._names, decision.scales, strict=False)),
            block_thresholds=tuple(zip(self._names, decision.thresholds, strict=False)),
        )

    def _scale(self, gradients: Sequence[Sequence[Tensor]], norms: Sequence[float], scales: Sequence[float]) -> None:
        """Scale this rank's shards, by block, and all of them down to the global limit: one pass over the gradients
        that change."""
        left = global_norm([scale * norm for scale, norm in zip(scales, norms, strict=True)])
        backstop = self._config.max_grad_norm / left if left > self._config.max_grad_norm else 1.0
        for block, scale in zip(gradients, scales, strict=True):
            if block and scale * backstop != 1.0:
                _torch._foreach_mul_(local_tensors(block), scale * backstop)
