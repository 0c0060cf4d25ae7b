"""Spikes planted in a live sharded step are found at every place, within the published number of passes."""

import numpy as np
import pytest
from support.trainer.gradloc_room import (
    located,
    on_policy,
    places,
    plant,
    random_step,
    run_step,
    spiking_loss,
    tau_of,
    watching,
)

from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks
from trainer.types.step import MicroBatch


@pytest.mark.parametrize("savings", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_planted_spike_is_found_at_every_place_within_the_bound(
    model: PolicyModel, alone: Ranks, savings: bool, micro_batches: int
):
    step = on_policy(model, alone, random_step(1, micro_batches=micro_batches))
    loss = spiking_loss()
    gradloc = watching(model, alone, tau_of(run_step(model, loss, alone, step)), loss, cut_sequences=savings)
    rng = np.random.default_rng(0)
    every = places(step)
    for index in rng.integers(len(every), size=25 if savings else 4):
        ran = run_step(model, loss, alone, plant(step, every[index], float(10 ** rng.uniform(3.5, 6))))
        report = gradloc.observe(ran.norm, ran.data)
        assert located(report) == [every[index]]
        assert report is not None
        levels = int(np.ceil(np.log2(max(int(micro.loss_mask.sum()) for micro in step))))
        assert report.passes <= micro_batches + 2 * levels + 1


def test_two_culprits_in_different_micro_batches_are_both_found(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    loss = spiking_loss()
    gradloc = watching(model, alone, tau_of(run_step(model, loss, alone, healthy)), loss)
    rng = np.random.default_rng(1)
    parts = [[place for place in places(healthy) if place[0] == m] for m in range(2)]
    for _ in range(5):
        chosen = [part[rng.integers(len(part))] for part in parts]
        step = plant(plant(healthy, chosen[0], 2e4), chosen[1], float(10 ** rng.uniform(4, 5)))
        ran = run_step(model, loss, alone, step)
        assert sorted(located(gradloc.observe(ran.norm, ran.data))) == chosen
