"""How hard terms pull, as the backward pass shows it, and the passes that a search saves by it."""

from pathlib import Path

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
    two_ranks_share_their_pulls,
    watching,
)
from support.trainer.trainer_room import run_ranks

from trainer.gradloc.probe.backward_record import BackwardRecord
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks


@pytest.fixture(scope="module")
def watched(alone: Ranks) -> tuple[PolicyModel, BackwardRecord]:
    model = small_model(alone)
    return model, BackwardRecord(model, alone)


def test_a_pull_is_the_gradient_at_the_logits_up_to_a_factor_of_at_most_sqrt_2(
    alone: Ranks, watched: tuple[PolicyModel, BackwardRecord]
):
    """Of softmax logits, the gradient of a log-prob has norm sqrt((1 - p)^2 + the other probabilities squared)."""
    model, record = watched
    step, loss = on_policy(model, alone, random_step(3, micro_batches=2)), spiking_loss()
    run_step(model, loss, alone, step, record)
    pulls = record.term_pulls([int(micro.loss_mask.sum()) for micro in step])
    assert pulls is not None
    for micro, pull in zip(step, pulls, strict=True):
        rows, columns = np.nonzero(micro.loss_mask)
        weights = np.abs(micro.advantages[rows, columns]) * micro.token_weights[rows]  # of a ratio of 1
        assert pull == pytest.approx(weights * (1 - np.exp(micro.old_logprobs[micro.loss_mask])), rel=1e-3)


def test_pulls_of_other_terms_than_asked_for_are_no_answer(alone: Ranks, watched: tuple[PolicyModel, BackwardRecord]):
    model, record = watched
    step, loss = on_policy(model, alone, random_step(3)), spiking_loss()
    run_step(model, loss, alone, step, record)
    sizes = [int(micro.loss_mask.sum()) for micro in step]
    assert record.term_pulls(sizes) is not None
    assert record.term_pulls([sizes[0] + 1, *sizes[1:]]) is None
    assert record.term_pulls([*sizes, 5]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_spike_is_found_in_two_passes_and_two_spikes_in_three(alone: Ranks, dtype: torch.dtype):
    model, loss = small_model(alone, dtype=dtype), spiking_loss()
    record = BackwardRecord(model, alone)
    step = on_policy(model, alone, random_step(7, micro_batches=4))
    gradloc = watching(model, alone, tau_of(run_step(model, loss, alone, step, record)), loss, dtype=dtype)
    every, rng = places(step), np.random.default_rng(1)
    for _ in range(6):
        first, second = (every[index] for index in rng.choice(len(every), 2, replace=False))
        for planted, wanted, passes in (
            (plant(step, first, 1e5), [first], 2),
            (plant(plant(step, first, 1e5), second, 3e4), [first, second], 4),
        ):
            ran = run_step(model, loss, alone, planted, record)
            report = gradloc.observe(ran.norm, ran.data, record=record)
            assert sorted(located(report)) == sorted(wanted) and report is not None and report.passes <= passes


def test_two_ranks_look_at_the_same_terms_first(tmp_path: Path):
    run_ranks(2, two_ranks_share_their_pulls, tmp_path)
