"""Advantages by the rewards, the largest update of AdamW, and evidence that steps go against their rewards."""

import math

import numpy as np
import pytest
import torch
from support.builders import build_dispatch, build_group

from trainer.algorithms.registry import build_algorithm
from trainer.config.trainer import (
    AlgorithmConfig,
    AlgorithmSection,
    GrpoConfig,
    GspoConfig,
    OptimizerConfig,
    QkClipConfig,
    RlooConfig,
)
from trainer.consistency.checks.cusum import Cusum
from trainer.consistency.checks.step import advantages_of, drive, evidence_against, largest_update


@pytest.mark.parametrize(
    "config", [GrpoConfig(), GrpoConfig(normalize_std=False), GspoConfig(std_epsilon=0.1), RlooConfig()], ids=str
)
@pytest.mark.parametrize("rewards", [(0.0, 1.0, 1.0, 0.0), (0.3, -2.0, 5.0), (0.7, 0.7, 0.7)], ids=str)
def test_advantages_by_the_rewards_are_the_algorithms_own(config: AlgorithmConfig, rewards: tuple[float, ...]):
    group = build_group(build_dispatch(0, group_size=len(rewards)), list(rewards))
    own = np.asarray(build_algorithm(config).advantages(group), dtype=np.float64)
    by_rewards = advantages_of(rewards, config)
    assert by_rewards is not None
    np.testing.assert_allclose(by_rewards, own, rtol=1e-5, atol=1e-6)


def test_no_advantage_is_expected_where_the_rewards_of_the_group_do_not_decide_it():
    assert advantages_of((0.0, 1.0), GrpoConfig(baseline="trained")) is None
    assert advantages_of((0.0, 1.0), AlgorithmSection()) is None


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99)])
def test_adamw_moves_no_parameter_by_more_than_the_bound_and_one_by_nearly_so(beta1: float, beta2: float):
    config = OptimizerConfig(learning_rate=1.0, beta1=beta1, beta2=beta2)
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(2000, dtype=torch.float64))
    adam = torch.optim.AdamW([parameter], lr=1.0, betas=(beta1, beta2), eps=1e-12, weight_decay=0.0)
    for number in range(1, 40):
        before = parameter.detach().clone()
        quiet = torch.arange(2000) < 50 * number  # some have had tiny gradients until now
        parameter.grad = torch.randn(2000, generator=generator, dtype=torch.float64) * torch.where(quiet, 1.0, 1e-6)
        adam.step()
        moved, bound = float((parameter.detach() - before).abs().max()), largest_update(config, number)
        assert bound is not None
        assert moved <= bound * (1 + 1e-9)
        assert number > 1 or moved == pytest.approx(bound, rel=1e-5)


def test_other_optimizers_have_no_bound():
    assert largest_update(OptimizerConfig(type="muon"), 1) is None
    assert largest_update(OptimizerConfig(qk_clip=QkClipConfig(enabled=True)), 1) is None


def test_the_drive_is_self_normalised():
    assert drive([2.0, 2.0]) == pytest.approx(math.sqrt(2.0))
    assert drive([-1e-9, 0.0]) == -1.0
    assert drive([]) == drive([0.0]) == 0.0


@pytest.mark.parametrize(("mean", "found"), [(0.0, False), (0.5, False), (-1.0, True)])
def test_steps_are_reported_when_they_go_against_their_rewards_and_not_when_they_only_wander(mean: float, found: bool):
    rng, chart = np.random.default_rng(1), Cusum(12.0)
    steps = 60 if found else 20_000
    pushes = rng.standard_t(2, size=(steps, 4)) + mean
    assert any(chart.add(evidence_against(drive(each))) for each in pushes.tolist()) is found
