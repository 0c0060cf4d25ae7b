"""Norms that backward leaves behind: those of each micro-batch's own gradient, and what a search saves with them."""

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
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
    two_ranks_know_the_norms_of_parts,
    watching,
)
from support.trainer.trainer_room import run_ranks
from torch.distributed.fsdp import FSDPModule

from rollout.errors import UserError
from trainer.gradloc.probe.backward_record import BackwardRecord
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks


@pytest.fixture(scope="module")
def watched(alone: Ranks) -> tuple[PolicyModel, BackwardRecord]:
    """A model whose first passes ran before and after its hooks."""
    model = small_model(alone)
    on_policy(model, alone, random_step(0))
    return model, BackwardRecord(model, alone, term_pulls=False)


def norms_of(record: BackwardRecord, micro_batches: int) -> NDArray[np.float64]:
    norms = record.part_norms(micro_batches)
    assert norms is not None
    return norms


def test_norms_are_those_of_each_micro_batch_alone(alone: Ranks, watched: tuple[PolicyModel, BackwardRecord]):
    model, record = watched
    step, loss = on_policy(model, alone, random_step(3, micro_batches=3)), spiking_loss()
    alone_norms = [run_step(model, loss, alone, [micro]).norm for micro in step]
    run_step(model, loss, alone, step, record)
    assert norms_of(record, 3).tolist() == [[pytest.approx(norm, rel=1e-5)] for norm in alone_norms]
    run_step(model, loss, alone, step[2:], record)
    assert norms_of(record, 3)[:, 0].tolist() == pytest.approx([alone_norms[2], *alone_norms[1:]], rel=1e-5)


def test_passes_that_are_not_recorded_leave_the_norms_alone(alone: Ranks, watched: tuple[PolicyModel, BackwardRecord]):
    model, record = watched
    step, loss = on_policy(model, alone, random_step(4)), spiking_loss()
    run_step(model, loss, alone, step, record)
    before = norms_of(record, 2)
    run_step(model, loss, alone, plant(step, places(step)[0], 1e6))
    assert np.array_equal(norms_of(record, 2), before)


def test_a_step_with_a_micro_batch_that_was_not_recorded_is_refused_though_the_step_before_had_it(
    alone: Ranks, watched: tuple[PolicyModel, BackwardRecord]
):
    model, record = watched
    step, loss = on_policy(model, alone, random_step(4)), spiking_loss()
    ran = run_step(model, loss, alone, step, record)
    gradloc = watching(model, alone, tau_of(ran), loss)
    assert gradloc.observe(ran.norm, ran.data, record=record) is None
    with record.recording(1):
        pass
    with pytest.raises(UserError, match="without micro-batch 0 of 2"):
        gradloc.observe(ran.norm, ran.data, record=record)


def test_gradients_that_pile_up_unreduced_are_refused_with_the_cure(alone: Ranks):
    model, loss = small_model(alone), spiking_loss()
    record, step = BackwardRecord(model, alone), on_policy(model, alone, random_step(4))
    cast(FSDPModule, model).set_requires_gradient_sync(False)
    with pytest.raises(UserError, match="set_requires_gradient_sync"):
        run_step(model, loss, alone, step, record)


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_a_search_that_knows_them_needs_no_pass_over_micro_batches(
    alone: Ranks, watched: tuple[PolicyModel, BackwardRecord], micro_batches: int
):
    model, record = watched
    step, loss = on_policy(model, alone, random_step(5, micro_batches=micro_batches)), spiking_loss()
    gradloc = watching(model, alone, tau_of(run_step(model, loss, alone, step)), loss)
    levels = int(np.ceil(np.log2(max(int(micro.loss_mask.sum()) for micro in step))))
    rng = np.random.default_rng(6)
    every = places(step)
    for index in rng.integers(len(every), size=5):
        ran = run_step(model, loss, alone, plant(step, every[index], 1e5), record)
        without, with_norms = gradloc.observe(ran.norm, ran.data), gradloc.observe(ran.norm, ran.data, record=record)
        assert located(without) == located(with_norms) == [every[index]]
        assert without is not None and with_norms is not None
        assert with_norms.passes <= min(2 * levels + 1, without.passes - micro_batches + 1)


def test_two_ranks_know_the_norm_of_every_part(tmp_path: Path):
    run_ranks(2, two_ranks_know_the_norms_of_parts, tmp_path)
