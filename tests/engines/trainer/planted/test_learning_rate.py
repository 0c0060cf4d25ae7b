"""A planted learning rate moves the weights farther from its start version on, and the report says so."""

from typing import Any, cast

import pytest
import torch
from torch import nn

from rollout.faults.config import FaultsConfig
from rollout.faults.data_config import HighLearningRateFault
from trainer.config.trainer import OptimizerConfig
from trainer.model.blocks import Block
from trainer.model.ranks import Ranks
from trainer.optim.optimizer import PolicyOptimizer
from trainer.planted.learning_rate import planted_rate

ALONE = Ranks(rank=0, world=1, device=torch.device("cpu"), mesh=cast(Any, None))
CONFIG = OptimizerConfig(learning_rate=1e-3)


def steps(*faults: HighLearningRateFault) -> list[tuple[float, float]]:
    """(how far a weight moved, the rate that was reported) of steps 1 to 3 under a constant gradient."""
    weight = nn.Parameter(torch.zeros(2))
    rate = planted_rate(FaultsConfig(plant=faults), CONFIG, 10)
    optimizer = PolicyOptimizer([Block(name="one", parameters=(weight,))], CONFIG, ALONE, rate)
    moved: list[tuple[float, float]] = []
    for step in (1, 2, 3):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, 0.1)
        report = optimizer.apply(step, optimizer.measure())
        moved.append((float((before - weight.detach()).abs().max()), report.learning_rate))
    return moved


def test_steps_from_the_start_version_on_use_the_multiplied_rate():
    moved = steps(HighLearningRateFault(start_version=2, factor=50))
    assert [rate for _, rate in moved] == pytest.approx([1e-3, 5e-2, 5e-2])
    assert [far for far, _ in moved] == pytest.approx([1e-3, 5e-2, 5e-2], rel=1e-3)


def test_without_the_fault_the_rate_is_the_plain_one():
    assert [rate for _, rate in steps()] == pytest.approx([1e-3] * 3)
