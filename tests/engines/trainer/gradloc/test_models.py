"""The search on other models and losses: experts, tied weights, bfloat16, dropout, weights by sequence."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.trainer.gradloc_room import (
    located,
    on_policy,
    places,
    plant,
    random_step,
    run_step,
    small_model,
    spiking_loss,
    tau_of,
    watching,
)

from rollout.errors import UserError
from trainer.config.consistency import CorrectionConfig, MisSequenceConfig, NoCorrection, OpsmConfig
from trainer.gradloc.probe.probe import GradientProbe, StepData
from trainer.gradloc.probe.step_terms import rank_terms, step_terms
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks
from trainer.types.step import MicroBatch


@pytest.mark.parametrize("kind", ["moe", "tied", "bfloat16", "dropout", "sequence"])
def test_other_models_and_losses_are_searched_alike(alone: Ranks, kind: str):
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = small_model(
        alone,
        moe=kind == "moe",
        dtype=dtype,
        tie_word_embeddings=kind == "tied",
        attention_dropout=0.2 if kind == "dropout" else 0.0,
    )
    step = on_policy(model, alone, random_step(2))
    model.train(kind == "dropout")
    loss = spiking_loss(OpsmConfig(delta=1e9) if kind == "sequence" else None)
    gradloc = watching(model, alone, tau_of(run_step(model, loss, alone, step)), loss, dtype)
    rng = np.random.default_rng(2)
    every = places(step)
    for index in rng.integers(len(every), size=4):
        ran = run_step(model, loss, alone, plant(step, every[index], 1e5))
        assert located(gradloc.observe(ran.norm, ran.data)) == [every[index]]


def test_dropout_without_recorded_random_states_is_refused(alone: Ranks, healthy: tuple[MicroBatch, ...]):
    model = small_model(alone, attention_dropout=0.2).train()
    with pytest.raises(UserError, match=r"RandomState\.take"):
        watching(model, alone, 1e-6).observe(1.0, StepData(micro_batches=healthy))


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("correction", [NoCorrection(), MisSequenceConfig(low=1e-30, high=1e30)])
def test_gradients_of_parts_add_up_to_the_steps(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...], correction: CorrectionConfig, cut: bool
):
    """Where a token's weight is its sequence's, a part keeps the weight that it had in the whole."""
    rng = np.random.default_rng(0)
    rollout = [
        np.where(m.loss_mask, m.old_logprobs - rng.uniform(0, 0.1, m.loss_mask.shape), 0).astype(np.float32)
        for m in healthy
    ]
    shifted = tuple(replace(m, rollout_logprobs=logprobs) for m, logprobs in zip(healthy, rollout, strict=True))
    loss = spiking_loss(correction)
    ran = run_step(model, loss, alone, shifted)
    table = step_terms([rank_terms(shifted)])
    with GradientProbe(model, loss, alone, ran.data, table, eps=1.2e-7, cut=cut) as probe:
        for first in (table.all[:5], table.all[3::4], table.of(1)):
            second = np.setdiff1d(table.all, first)
            assert probe.rest(second) == pytest.approx(probe.norm(first), rel=1e-4)
        assert probe.rest(table.all) < 1e-5 * ran.norm
