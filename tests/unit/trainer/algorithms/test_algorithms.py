"""Advantages against golden vectors, the surrogate's clip, and the gradient of the KL terms against the exact KL."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.builders import build_group
from torch import Tensor

from rollout.errors import UserError
from trainer.algorithms.registry import build_algorithm
from trainer.config.trainer import AlgorithmConfig, GrpoConfig, GspoConfig, RlooConfig
from trainer.loss.kl_estimate import kl_estimate
from trainer.types.loss_tokens import LossTokens

GROUPS = {
    "r100": (1.0, 0.0, 0.0),
    "r1h0": (1.0, 0.5, 0.0),
    "all0": (0.0, 0.0, 0.0),
    "hard_group_half": (0.0, 0.5, 0.0, 0.0),
}


def advantages(config: AlgorithmConfig, *totals: float) -> NDArray[np.float32]:
    return np.asarray(build_algorithm(config).advantages(build_group(rewards=totals)))


def tokens(old: Tensor, advantage: Tensor) -> LossTokens:
    empty = torch.zeros(0, dtype=torch.int64)
    return LossTokens(
        token_ids=empty,
        positions=empty,
        targets=empty,
        old_logprobs=old,
        rollout_logprobs=old,
        advantages=advantage,
        weights=torch.ones_like(old),
        rows=torch.zeros(old.numel(), dtype=torch.int64),
    )


@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize(("key", "epsilon"), [("adv", 1e-6), ("adv_eps0", 0.0)])
def test_grpo_advantages_are_the_golden_ones(golden: dict[str, Any], name: str, key: str, epsilon: float):
    expected = golden["V15_selfverify"][name][key]
    np.testing.assert_allclose(
        advantages(GrpoConfig(std_epsilon=epsilon), *GROUPS[name]), expected, rtol=1e-6, atol=1e-7
    )


ALGORITHMS: tuple[AlgorithmConfig, ...] = (
    GrpoConfig(std_epsilon=0.0),
    GrpoConfig(normalize_std=False),
    RlooConfig(),
    GspoConfig(std_epsilon=0.0),
)


@pytest.mark.parametrize("config", ALGORITHMS)
@pytest.mark.parametrize(
    "rewards", [(0.1,) * 3, (0.7,) * 7, (1 / 3,) * 6, (0.1 + 0.2, 0.3, 0.3), (-0.3, -0.3), (0.0,) * 4]
)
def test_alike_rewards_give_exactly_zero(config: AlgorithmConfig, rewards: tuple[float, ...]):
    """RLOO's others' mean of .7 seven times is .7 less 1e-16: that is no signal."""
    assert advantages(config, *rewards).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize("config", ALGORITHMS)
def test_a_small_difference_is_one(config: AlgorithmConfig):
    found = advantages(config, 0.7, 0.7, 0.7 + 1e-9)
    assert found[2] > 0 > found[0] == found[1]


def test_grpo_without_division_only_centres():
    np.testing.assert_allclose(
        advantages(GrpoConfig(normalize_std=False), 1.0, 0.0, 0.0), [2 / 3, -1 / 3, -1 / 3], rtol=1e-6
    )


def test_rloo_takes_the_mean_of_the_others():
    np.testing.assert_allclose(advantages(RlooConfig(), 1.0, 0.5, 0.0), [0.75, 0.0, -0.75], rtol=1e-6)


@pytest.mark.parametrize("config", [GrpoConfig(), RlooConfig()])
def test_a_group_of_one_is_refused(config: GrpoConfig | RlooConfig):
    with pytest.raises(UserError, match="group_size"):
        advantages(config, 1.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope"),
    [
        (1.5, 1.0, -1.28, 0.0),  # beyond the upper bound: no gradient
        (1.5, -1.0, 1.5, 1.5),  # a rise of a bad token is never clipped
        (0.5, -1.0, 0.8, 0.0),  # beyond the lower bound
        (0.5, 1.0, -0.5, -0.5),
        (1.1, 2.0, -2.2, -2.2),
    ],
)
def test_the_surrogate_clips_each_side_at_its_own_bound(ratio: float, advantage: float, term: float, slope: float):
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0 - np.log(ratio)], dtype=torch.float64)
    loss = build_algorithm(GrpoConfig(clip_low=0.2, clip_high=0.28)).loss(
        logprob, tokens(old, torch.tensor([advantage], dtype=torch.float64))
    )
    loss.sum().backward()
    assert logprob.grad is not None
    np.testing.assert_allclose([loss.item(), logprob.grad.item()], [term, slope], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_weighted_kl_estimate_has_the_gradient_of_the_exact_kl(estimator: Any):
    """Over all tokens of a distribution that the old policy weighs, value and gradient are those of KL(policy ||
    reference)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, generator=generator, dtype=torch.float64).requires_grad_()
    old, reference = (
        torch.log_softmax(torch.randn(9, generator=generator, dtype=torch.float64), dim=0) for _ in range(2)
    )
    logprobs = torch.log_softmax(logits, dim=0)
    expected = (logprobs.exp() * (logprobs - reference)).sum()
    (exact,) = torch.autograd.grad(expected, logits, retain_graph=True)
    estimate = (old.exp() * torch.exp(logprobs - old) * kl_estimate(logprobs, reference, estimator)).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(estimate, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, exact, rtol=1e-10, atol=1e-12)


def test_the_weighted_k3_is_the_golden_one(golden: dict[str, Any]):
    vector = golden["V5_unbiased_kl_v32"]
    now, old, reference = (torch.tensor([vector[key]], dtype=torch.float64) for key in ("lp_theta", "lp_old", "lp_ref"))
    k3 = kl_estimate(now, reference, "k3")
    np.testing.assert_allclose(
        [k3.item(), (torch.exp(now - old) * k3).item()], [vector["k3_ref"], vector["value"]], rtol=1e-9
    )
