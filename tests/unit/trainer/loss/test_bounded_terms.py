"""What a correction drops or bounds in the loss: the policy's term, the KL term and the entropy bonus together, against
a float64 calculation of its own; and nothing is NaN where an exponential overflows."""

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.algorithms.registry import build_algorithm
from trainer.config.consistency import (
    CorrectionConfig,
    DecoupledConfig,
    GeoRsConfig,
    IcePopConfig,
    MisSequenceConfig,
    MisTokenConfig,
    NoCorrection,
    OpsmConfig,
    SeqClipConfig,
    TisConfig,
)
from trainer.config.trainer import AlgorithmConfig, GrpoConfig, GspoConfig, RlooConfig
from trainer.loss.policy_loss import PolicyLoss
from trainer.model.policy_model import PolicyModel
from trainer.types.loss_tokens import LossTokens
from trainer.types.step import OldLogprobSource

Numbers = NDArray[np.float64]
ROLLOUT, RECOMPUTED = OldLogprobSource.ROLLOUT, OldLogprobSource.RECOMPUTED
KL, ENTROPY = 0.05, 0.02
CORRECTIONS: tuple[CorrectionConfig, ...] = (
    NoCorrection(),
    NoCorrection(veto=0.4),
    TisConfig(),
    IcePopConfig(),
    MisTokenConfig(),
    MisSequenceConfig(),
    SeqClipConfig(low=0.9, high=1.2),
    GeoRsConfig(low=0.9, high=1.2),
    OpsmConfig(delta=0.05),
    DecoupledConfig(),
    DecoupledConfig(cap=1.5),
    TisConfig(veto=0.4),
)


class Logged:
    """Seeded tokens of 40 sequences of 10, in float64: log-probs of the policy, of the scorer, of the sampler and of
    the reference; a drift for each sequence and a spread over its tokens."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        rng, shape = np.random.default_rng(seed), (40, 10)
        self.dtype = dtype
        self.now = -rng.exponential(1.0, shape) - 0.2
        self.old = self.now - rng.normal(0, 0.15, (40, 1)) - rng.normal(0, 0.1, shape)
        self.sampler = self.old - rng.normal(0, 0.1, (40, 1)) - rng.normal(0, 0.25, shape)
        self.reference = self.now + rng.normal(0, 0.3, shape)
        self.entropies = rng.uniform(0.5, 2.0, shape)
        self.advantages = np.repeat(np.where(np.arange(40) % 4 == 0, 0.0, rng.normal(0, 1, 40))[:, None], 10, axis=1)

    def sampler_says(self, row: int, nats: float) -> None:
        """One token of `row` was logged with `nats` less than the trainer's value, and scored alike."""
        self.sampler[row, 3] = self.old[row, 3] = self.now[row, 3] - nats

    def run(
        self, config: AlgorithmConfig, correction: CorrectionConfig, source: OldLogprobSource
    ) -> tuple[float, Numbers, Numbers, dict[str, float]]:
        """Loss with weights of 1, its gradients by log-prob and entropy, and the sums."""
        logprobs, entropies = self._flat(self.now).requires_grad_(), self._flat(self.entropies).requires_grad_()

        def model(*arguments: object) -> tuple[Tensor, Tensor]:
            return logprobs, entropies

        def reference(*arguments: object) -> tuple[Tensor, Tensor]:
            return self._flat(self.reference), entropies.detach()

        empty = torch.zeros(0, dtype=torch.int64)
        tokens = LossTokens(
            token_ids=torch.zeros((40, 11), dtype=torch.int64),
            positions=empty,
            targets=empty,
            old_logprobs=self._flat(self.old if source is RECOMPUTED else self.sampler),
            rollout_logprobs=self._flat(self.sampler),
            advantages=self._flat(self.advantages),
            weights=torch.ones(400, dtype=self.dtype),
            rows=torch.arange(40).repeat_interleave(10),
        )
        loss = PolicyLoss(config, build_algorithm(config), cast(PolicyModel, cast(Any, reference)), correction)
        value, sums = loss(cast(PolicyModel, cast(Any, model)), tokens, 1.0, source)
        value.backward()
        return (
            float(value.detach()),
            self._gradient(logprobs),
            self._gradient(entropies),
            dict(zip(loss.sums, sums.tolist(), strict=True)),
        )

    def _gradient(self, leaf: Tensor) -> Numbers:
        return np.zeros((40, 10)) if leaf.grad is None else leaf.grad.double().numpy().reshape(40, 10)

    def _flat(self, values: Numbers) -> Tensor:
        return torch.tensor(values.reshape(-1), dtype=self.dtype)


def spread(values: NDArray[Any] | float) -> Numbers:
    """One number a sequence, for each of its tokens."""
    return np.repeat(np.asarray(values, dtype=np.float64)[:, None], 10, axis=1)


def kept_and_weighed(correction: CorrectionConfig, log_ratio: Numbers, drift: Numbers, advantages: Numbers) -> Numbers:
    """The weights that the page on consistency gives, without the veto."""
    ratio, product, mean = np.exp(log_ratio), np.exp(log_ratio.sum(1)), np.exp(log_ratio.mean(1))
    match correction:
        case TisConfig():
            return np.minimum(ratio, correction.cap)
        case IcePopConfig() | MisTokenConfig():
            return ratio * ((ratio >= correction.low) & (ratio <= correction.high))
        case MisSequenceConfig():
            return spread(product * ((product >= correction.low) & (product <= correction.high)))
        case SeqClipConfig() | GeoRsConfig():
            return spread(((mean > correction.low) & (mean < correction.high)).astype(float))
        case OpsmConfig():
            return spread(1.0 - ((advantages.mean(1) < 0) & (drift.mean(axis=1) > correction.delta)))
        case DecoupledConfig():
            return ratio * (ratio <= (correction.cap or math.inf))
        case _:
            return np.ones_like(ratio)


def wanted(
    logged: Logged, config: AlgorithmConfig, correction: CorrectionConfig, source: OldLogprobSource
) -> tuple[Numbers, Numbers, int, int]:
    """Gradients by log-prob and entropy, and tokens clipped from below and above, from the formulas on the page."""
    old = logged.old if source is RECOMPUTED else logged.sampler
    from_now = isinstance(correction, DecoupledConfig) or (source is ROLLOUT and correction.carries_ratio)
    scored = old if source is RECOMPUTED and not isinstance(correction, DecoupledConfig) else logged.now
    weights = kept_and_weighed(correction, scored - logged.sampler, logged.sampler - logged.now, logged.advantages)
    left = np.ones_like(weights)
    if correction.veto is not None:
        left = spread(1.0 - (np.exp(scored - logged.sampler) < correction.veto).any(1))
    weights = weights * left
    moved = np.zeros_like(old) if from_now else logged.now - old
    ratio = spread(np.exp(moved.mean(axis=1))) if isinstance(config, GspoConfig) else np.exp(moved)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    below = (ratio < low) & (logged.advantages < 0) & (weights > 0)
    above = (ratio > high) & (logged.advantages > 0) & (weights > 0)
    policy = -weights * ratio * logged.advantages * ~(below | above)
    divergence = left if isinstance(correction, OpsmConfig) else weights
    distance = logged.now - logged.reference
    slope = distance + 1.0 if config.kl_estimator == "k1" else distance  # estimate + its derivative
    kl = config.kl_coef * divergence * np.minimum(ratio, high) * slope
    return policy + kl, -config.entropy_coef * left, int(below.sum()), int(above.sum())


ALGORITHMS: Sequence[AlgorithmConfig] = (
    GrpoConfig(kl_coef=KL, entropy_coef=ENTROPY),
    RlooConfig(kl_coef=KL, entropy_coef=ENTROPY, kl_estimator="k1"),
    GspoConfig(kl_coef=KL, entropy_coef=ENTROPY, clip_low=0.1, clip_high=0.1),
)


@pytest.mark.parametrize("source", list(OldLogprobSource))
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: c.type)
@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda c: c.type)
def test_gradients_and_clip_counts_are_those_of_the_formulas(
    config: AlgorithmConfig, correction: CorrectionConfig, source: OldLogprobSource
):
    logged = Logged()
    _, by_logprob, by_entropy, sums = logged.run(config, correction, source)
    gradient, entropy, below, above = wanted(logged, config, correction, source)
    np.testing.assert_allclose(by_logprob, gradient, rtol=1e-10, atol=1e-13)
    np.testing.assert_allclose(by_entropy, entropy, rtol=1e-12)
    assert (sums["clip_fraction_low"], sums["clip_fraction_high"]) == (below, above)


@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: c.type)
def test_nothing_is_clipped_where_the_surrogate_starts_from_the_step(correction: CorrectionConfig):
    _, _, _, sums = Logged().run(GrpoConfig(), correction, ROLLOUT)
    clipped = sums["clip_fraction_low"] + sums["clip_fraction_high"]
    assert (clipped == 0) == correction.carries_ratio


@pytest.mark.parametrize("source", list(OldLogprobSource))
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: c.type)
def test_a_sequence_under_a_veto_pulls_at_nothing(correction: CorrectionConfig, source: OldLogprobSource):
    """The sampler was 9 nats surer of one token than the trainer."""
    logged = Logged()
    logged.sampler[7, 3] = logged.now[7, 3] + 9.0
    _, by_logprob, by_entropy, _ = logged.run(
        GrpoConfig(kl_coef=KL, entropy_coef=ENTROPY), correction.model_copy(update={"veto": 1e-3}), source
    )
    assert not by_logprob[7].any() and not by_entropy[7].any()
    assert by_entropy.any()


@pytest.mark.parametrize("source", list(OldLogprobSource))
@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda c: c.type)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: c.type)
def test_an_unlikely_sample_pulls_through_the_kl_term_no_harder_than_the_correction_lets_it(
    config: AlgorithmConfig, correction: CorrectionConfig, source: OldLogprobSource
):
    """A token with importance ratio 812: its gradient was 7.1 at kl_coef .05, and .25 for its neighbours."""
    logged = Logged()
    logged.advantages[:] = 0.0
    logged.sampler_says(5, math.log(812.0))
    logged.reference[5, 3] = logged.now[5, 3] + 0.2
    _, by_logprob, _, _ = logged.run(config, correction, source)
    # Where a sequence's ratios are multiplied, that of the others is in the weight too; the band bounds it.
    largest = {"tis": 2.0, "icepop": 5.0, "mis_token": 2.0, "mis_sequence": 3.0, "decoupled": 1.5}
    bound = largest.get(correction.type, 1.0) * (1 + config.clip_high)
    if correction == DecoupledConfig():
        return  # asked for without a bound
    slope = abs(logged.now[5, 3] - logged.reference[5, 3] + (config.kl_estimator == "k1"))
    assert abs(by_logprob[5, 3]) <= KL * bound * slope * (1 + 1e-9)


@pytest.mark.parametrize("source", list(OldLogprobSource))
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: c.type)
@pytest.mark.parametrize("advantage", [1.0, 0.0])
@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda c: c.type)
def test_a_ratio_beyond_the_float_range_that_is_clipped_or_dropped_has_gradient_zero(
    config: AlgorithmConfig, advantage: float, correction: CorrectionConfig, source: OldLogprobSource
):
    """e^100 overflows float32; 0 times it was NaN. A whole sequence of such tokens: its mean is beyond 88 nats too."""
    logged = Logged(dtype=torch.float32)
    logged.advantages[5] = advantage
    logged.old[5] = logged.sampler[5] = logged.now[5] - 100.0
    if correction == DecoupledConfig():
        return  # without a cap the weight itself is beyond the range, which is refused by name
    value, by_logprob, by_entropy, sums = logged.run(config, correction, source)
    assert math.isfinite(value) and np.isfinite(by_logprob).all() and np.isfinite(by_entropy).all()
    assert all(math.isfinite(number) for number in sums.values())
    bounded = correction.type == "tis" and source is ROLLOUT  # a truncated weight keeps its token
    policy_only = config.model_copy(update={"kl_coef": 0.0, "entropy_coef": 0.0})
    _, by_logprob, _, _ = logged.run(policy_only, correction, source)
    np.testing.assert_allclose(by_logprob[5], -2.0 * advantage if bounded else 0.0, rtol=1e-6)


@pytest.mark.parametrize("source", list(OldLogprobSource))
def test_a_dropped_token_beyond_the_float_range_is_zero_with_a_negative_advantage_too(source: OldLogprobSource):
    """The surrogate does not clip there: the drop alone keeps it out."""
    logged = Logged(dtype=torch.float32)
    logged.advantages[5] = -1.0
    logged.old[5, 3], logged.sampler[5, 3] = logged.now[5, 3] - 100.0, logged.now[5, 3] - 120.0
    for correction in (IcePopConfig(), MisTokenConfig(), DecoupledConfig(cap=2.0)):
        value, by_logprob, _, _ = logged.run(GrpoConfig(kl_coef=KL, entropy_coef=ENTROPY), correction, source)
        assert math.isfinite(value) and np.isfinite(by_logprob).all() and by_logprob[5, 3] == 0.0


@pytest.mark.parametrize("source", list(OldLogprobSource))
def test_opsm_asks_the_sampler_that_logged_the_tokens(source: OldLogprobSource):
    """Public fault 82: against recomputed log-probs the engine's ratio enters nowhere, and nothing is dropped."""
    logged = Logged()
    logged.old[:] = logged.now
    logged.sampler[:] = logged.now + 0.8
    logged.advantages[:] = -1.0
    _, _, _, sums = logged.run(GrpoConfig(), OpsmConfig(delta=0.1), source)
    assert sums["weight_zero"] == 400
