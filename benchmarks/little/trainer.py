"""A real trainer of one rank in this process, whose gradients can be changed before they are measured."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from trainer.algorithms.registry import build_algorithm
from trainer.config.consistency import NoCorrection
from trainer.config.trainer import TrainerConfig, WeightsConfig
from trainer.loss.policy_loss import PolicyLoss
from trainer.model.blocks import Block, named_blocks
from trainer.model.loading import DTYPES, load_policy
from trainer.model.ranks import Ranks, join_ranks, local_tensor
from trainer.optim.optimizer import GradientNorms, LearningRate, PolicyOptimizer, learning_rate
from trainer.optim.step_watch import StepWatch
from trainer.step.gradient_step import GradientStep
from trainer.step.noted_loss import NotedLoss
from trainer.step.policy_trainer import PolicyTrainer, TrainerParts
from trainer.weights.canary import canary_token_ids
from trainer.weights.weight_writer import WeightWriter

Gradients: TypeAlias = Callable[[int, str, Tensor], None]
"""Changes the gradient of one parameter in place: (step from 1, name of its block, gradient)."""


class PlantedOptimizer(PolicyOptimizer):
    """Changes gradients before anybody measures them."""

    def __init__(
        self, blocks: Sequence[Block], trainer: TrainerConfig, ranks: Ranks, rate: LearningRate, change: Gradients
    ) -> None:
        super().__init__(blocks, trainer.optimizer, ranks, rate)
        self._planted, self._change, self._measured = tuple(blocks), change, 0

    def measure(self) -> GradientNorms:
        """As of `PolicyOptimizer`, after the change."""
        self._measured += 1
        for block in self._planted:
            for parameter in block.parameters:
                if parameter.grad is not None:
                    self._change(self._measured, block.name, local_tensor(parameter.grad))
        return super().measure()


def little_trainer(
    model_dir: Path, config: TrainerConfig, steps: int, seed: int, rendezvous: Path, gradients: Gradients | None
) -> PolicyTrainer:
    """Rank 0 of 1. Close it before the next."""
    ranks = join_ranks(config, 0, f"file://{rendezvous}")
    torch.manual_seed(seed)
    model, layout = load_policy(model_dir, config, ranks)
    reference = load_policy(model_dir, config, ranks, frozen=True)[0] if config.algorithm.kl_coef > 0 else None

    def rate(step: int) -> float:
        return learning_rate(config.optimizer, steps, step)

    optimizer = (
        PolicyOptimizer(named_blocks(model), config.optimizer, ranks, rate)
        if gradients is None
        else PlantedOptimizer(named_blocks(model), config, ranks, rate, gradients)
    )
    algorithm, dtype = build_algorithm(config.algorithm), DTYPES[config.dtype]
    noted = NotedLoss(PolicyLoss(config.algorithm, algorithm, reference, NoCorrection()))
    step = GradientStep(
        model,
        noted,
        optimizer,
        ranks,
        watch=StepWatch(config, model, named_blocks(model), ranks),
        gradloc=config.gradloc,
        dtype=dtype,
    )
    parts = TrainerParts(
        ranks=ranks,
        model=model,
        algorithm=algorithm,
        optimizer=optimizer,
        gradient=step,
        writer=WeightWriter(
            model, layout, model_dir, dtype=dtype, shard_bytes=WeightsConfig().shard_bytes, ranks=ranks
        ),
        sender=None,
        noted=noted,
        canary_ids=canary_token_ids(32, 32, 512),
    )
    return LittleTrainer(config, seed, parts)


class LittleTrainer(PolicyTrainer):
    """A trainer whose weights the engine in the same process reads."""

    def weights(self) -> dict[str, Tensor]:
        """Name in the Hugging Face model -> its values, shared with the trainer."""
        return {name: local_tensor(value.detach()) for name, value in self._model.causal_lm.named_parameters()}


def local_values(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """The weights of a `LittleTrainer`."""
    assert isinstance(trainer, LittleTrainer)
    return trainer.weights()
