"""Where importance weights enter the loss: pi_now / pi_rollout enters each gradient once, whichever old log-probs a
step has."""

import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.algorithms.registry import build_algorithm
from trainer.config.consistency import (
    CorrectionConfig,
    DecoupledConfig,
    MisTokenConfig,
    NoCorrection,
    SeqClipConfig,
    TisConfig,
)
from trainer.config.trainer import GrpoConfig
from trainer.loss.policy_loss import PolicyLoss
from trainer.loss.ratio_buckets import PARTS
from trainer.model.policy_model import PolicyModel
from trainer.types.loss_tokens import LossTokens
from trainer.types.step import OldLogprobSource

NOW = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
BEHAVIOUR = torch.tensor([-1.05, -1.05, -1.05, -1.05], dtype=torch.float64)
ROLLOUT = torch.tensor([-1.1, -1.3, -2.5, -0.8], dtype=torch.float64)
WIDE = GrpoConfig(clip_low=0.9, clip_high=100.0)
"""A clip that never binds, so that a gradient is the ratio itself."""


def run(
    correction: CorrectionConfig,
    source: OldLogprobSource,
    now: Tensor = NOW,
    behaviour: Tensor = BEHAVIOUR,
    rollout: Tensor = ROLLOUT,
) -> tuple[Tensor, dict[str, float]]:
    """Gradient of the loss by each token's log-prob, for advantages of 1 and weights of 1; and the sums."""
    logprobs = now.clone().requires_grad_()

    def model(*arguments: object) -> tuple[Tensor, Tensor]:
        return logprobs, torch.zeros_like(logprobs)

    empty, ones = torch.zeros(0, dtype=torch.int64), torch.ones_like(NOW)
    tokens = LossTokens(
        token_ids=torch.zeros((2, 3), dtype=torch.int64),
        positions=empty,
        targets=empty,
        old_logprobs=behaviour if source is OldLogprobSource.RECOMPUTED else rollout,
        rollout_logprobs=rollout,
        advantages=ones,
        weights=ones,
        rows=torch.tensor([0, 0, 1, 1]),
    )
    policy_loss = PolicyLoss(WIDE, build_algorithm(WIDE), None, correction)
    loss, sums = policy_loss(cast(PolicyModel, cast(Any, model)), tokens, 1.0, source)
    loss.backward()
    assert logprobs.grad is not None
    return -logprobs.grad, dict(zip(policy_loss.sums, sums.tolist(), strict=True))


def exp(values: Tensor) -> Tensor:
    return torch.exp(values)


@pytest.mark.parametrize("source", list(OldLogprobSource))
def test_without_a_correction_the_surrogate_carries_the_ratio_to_the_old_policy(source: OldLogprobSource):
    old = BEHAVIOUR if source is OldLogprobSource.RECOMPUTED else ROLLOUT
    torch.testing.assert_close(run(NoCorrection(), source)[0], exp(NOW - old))


def test_tis_on_rollout_logprobs_takes_the_whole_ratio_once_and_caps_it():
    torch.testing.assert_close(run(TisConfig(cap=2.0), OldLogprobSource.ROLLOUT)[0], exp(NOW - ROLLOUT).clamp(max=2.0))


def test_tis_on_recomputed_logprobs_caps_the_engines_part_alone():
    wanted = exp(NOW - BEHAVIOUR) * exp(BEHAVIOUR - ROLLOUT).clamp(max=2.0)
    torch.testing.assert_close(run(TisConfig(cap=2.0), OldLogprobSource.RECOMPUTED)[0], wanted)


@pytest.mark.parametrize("source", list(OldLogprobSource))
def test_decoupled_weighs_the_whole_ratio_from_rollout_to_the_start_of_the_step(source: OldLogprobSource):
    torch.testing.assert_close(run(DecoupledConfig(), source)[0], exp(NOW - ROLLOUT))


def test_a_masking_weight_drops_what_is_outside_its_band_and_says_how_much():
    gradient, sums = run(MisTokenConfig(low=0.5, high=2.0), OldLogprobSource.ROLLOUT)
    assert gradient[2] == 0.0
    torch.testing.assert_close(gradient[:2], exp(NOW - ROLLOUT)[:2])
    assert sums["weight_zero"] == 1.0


def test_a_sequence_that_is_dropped_leaves_the_denominators_alone():
    gradient, sums = run(SeqClipConfig(low=0.9, high=1.3), OldLogprobSource.ROLLOUT)
    torch.testing.assert_close(gradient[:2], exp(NOW - ROLLOUT)[:2])
    assert not gradient[2:].any()
    assert (sums["weight_zero"], sums["tokens"]) == (2.0, 4.0)


def test_the_report_splits_the_difference():
    _, sums = run(NoCorrection(), OldLogprobSource.RECOMPUTED)
    assert sums["engine_difference"] == pytest.approx(float((BEHAVIOUR - ROLLOUT).abs().sum()))
    assert sums["logprob_difference"] == pytest.approx(float((NOW - BEHAVIOUR).abs().sum()))
    assert sums["rollout_difference"] == pytest.approx(float((NOW - ROLLOUT).abs().sum()))


def split_of(now: float, behaviour: float, rollout: float) -> dict[str, float]:
    """A token's log-ratios as the report splits them: total, engine and stale."""
    given = (torch.full_like(NOW, nats) for nats in (now, behaviour, rollout))
    _, sums = run(NoCorrection(), OldLogprobSource.RECOMPUTED, *given)
    for part, name in (("stale", "logprob"), ("engine", "engine"), ("total", "rollout")):
        assert sums[f"{name}_difference"] == pytest.approx(abs(sums[f"log_ratio_{part}_sum"]), rel=1e-9)
    return {part: sums[f"log_ratio_{part}_sum"] / NOW.numel() for part in PARTS}


def test_the_ratio_splits_as_in_vector_v19(golden: dict[str, Any]):
    vector = golden["V19_decomp"]
    split = split_of(*(vector[key] for key in ("lp_train_now", "lp_train_at_rollout_version", "lp_rollout")))
    for part, name in (("stale", "staleness"), ("engine", "engine"), ("total", "total")):
        assert split[part] == pytest.approx(vector[f"{name}_log"], rel=1e-9)
        assert math.exp(split[part]) == pytest.approx(vector[f"{name}_ratio"], rel=1e-9)


NATS = st.floats(min_value=-60.0, max_value=0.0, width=32)


@given(NATS, NATS, NATS)
def test_invariant_7_staleness_ratio_times_engine_ratio_is_the_total_ratio(
    now: float, behaviour: float, rollout: float
):
    split = split_of(now, behaviour, rollout)
    product = math.exp(split["stale"]) * math.exp(split["engine"])
    assert product == pytest.approx(math.exp(split["total"]), rel=1e-6)


def test_a_policy_that_is_not_finite_makes_the_loss_not_finite_and_raises_nothing():
    _, sums = run(TisConfig(), OldLogprobSource.ROLLOUT, NOW.index_fill(0, torch.tensor([1]), math.nan))
    assert math.isnan(sums["loss"])
