"""The search on a live sharded step: the planted token is found, and nothing is left behind."""

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.paths import ROOT
from support.trainer.gradloc_room import (
    Spiking,
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
from torch import Tensor

from rollout.errors import UserError
from trainer.config.consistency import NoCorrection
from trainer.config.gradloc import CalibratedTau, GivenTau, GradLocConfig
from trainer.config.trainer import GrpoConfig
from trainer.gradloc import GradLoc
from trainer.gradloc.gradloc import StepSigns, TermPlace, without_terms
from trainer.gradloc.probe.backward_record import BackwardRecord
from trainer.gradloc.probe.probe import StepData
from trainer.gradloc.spent_passes import WINDOW_STEPS
from trainer.loss.policy_loss import PolicyLoss
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, local_tensor
from trainer.types.gradloc import Outcome
from trainer.types.loss_tokens import LossTokens
from trainer.types.step import MicroBatch


def gradients(model: PolicyModel) -> list[Tensor]:
    return [local_tensor(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("factor", [1.0, 1e5, float("nan")])
def test_gradients_random_state_and_weights_are_bit_identical_afterwards(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...], factor: float
):
    loss = spiking_loss()
    ran = run_step(model, loss, alone, plant(healthy, places(healthy)[9], factor))
    before, random, weights = (
        gradients(model),
        torch.get_rng_state(),
        [local_tensor(p).detach().clone() for p in model.parameters()],
    )
    report = watching(model, alone, 1e-6, loss).observe(ran.norm, ran.data)
    assert report is not None and report.passes > 0
    assert all(
        torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(before, gradients(model), strict=True)
    )
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(a, local_tensor(b)) for a, b in zip(weights, model.parameters(), strict=True))


def test_an_error_in_a_pass_leaves_the_gradients_too(model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]):
    ran = run_step(model, spiking_loss(), alone, healthy)
    before = gradients(model)
    failing = spiking_loss()

    def broken(*_: Any) -> Any:
        raise ArithmeticError("planted")

    setattr(failing, "_policy_terms", broken)  # noqa: B010
    with pytest.raises(ArithmeticError):
        watching(model, alone, 1e-6, failing).observe(ran.norm, ran.data)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(model), strict=True))
    assert run_step(model, spiking_loss(), alone, healthy).norm == pytest.approx(ran.norm, rel=1e-6)


def test_a_nan_token_is_found(model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]):
    loss = spiking_loss()
    for place in places(healthy)[::25]:
        ran = run_step(model, loss, alone, plant(healthy, place, float("nan")))
        report = watching(model, alone, 1.0, loss).observe(ran.norm, ran.data)
        assert located(report) == [place]
        assert report is not None and report.trigger == "non_finite"


class Unbounded(Spiking):
    """Where a spike was planted the term is infinite, by a constant: its gradient is not."""

    def loss(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        planted = tokens.rollout_logprobs > 0
        return super().loss(logprobs, tokens) + torch.where(planted, float("inf"), 0.0)


def test_a_loss_that_is_not_finite_is_found_though_every_gradient_is(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    loss = PolicyLoss(GrpoConfig(), Unbounded(), None, NoCorrection())
    place = places(healthy)[40]
    ran = run_step(model, loss, alone, plant(healthy, place, 1.0))
    assert math.isfinite(ran.norm)
    gradloc = watching(model, alone, 1e9, loss)
    report = gradloc.observe(ran.norm, ran.data, signs=StepSigns(loss=math.inf))
    assert located(report) == [place] and report is not None and report.trigger == "non_finite"
    assert gradloc.observe(ran.norm, ran.data) is None


def test_a_step_that_was_taken_otherwise_is_remembered_otherwise(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    ran = run_step(model, spiking_loss(), alone, healthy)
    gradloc = watching(model, alone, 1e9)
    histories: list[list[float]] = []
    for amended in (None, (), (2.0, 0.25)):
        gradloc.load_state({"history": [5.0], "suspect_passes": [], "spike_passes": []})
        gradloc.observe(ran.norm, ran.data)
        if amended is not None:
            gradloc.amend(*amended)
        histories.append(gradloc.state()["history"])
    assert histories == [[pytest.approx(ran.norm / ran.weight_square**0.5)], [5.0], [4.0]]


def test_a_right_suspect_takes_two_passes_and_a_wrong_one_costs_one(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    loss = spiking_loss()
    gradloc = watching(model, alone, tau_of(run_step(model, loss, alone, healthy)), loss)
    right, wrong = places(healthy)[30], places(healthy)[3]
    ran = run_step(model, loss, alone, plant(healthy, right, 1e5))
    searched, suspected, misled = (
        gradloc.observe(
            ran.norm, ran.data, suspects=[TermPlace(micro_batch=m, row=r, position=p) for m, r, p in suspects]
        )
        for suspects in ([], [right], [wrong])
    )
    assert located(searched) == located(suspected) == located(misled) == [right]
    assert searched is not None and suspected is not None and misled is not None
    assert suspected.passes == 1 and misled.passes == searched.passes + 1


def test_a_right_suspect_of_a_huge_spike_in_bfloat16_takes_two_passes_too(
    alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    model, loss = small_model(alone, dtype=torch.bfloat16), spiking_loss()
    record = BackwardRecord(model, alone)
    usual, place = run_step(model, loss, alone, healthy, record), places(healthy)[30]
    ran = run_step(model, loss, alone, plant(healthy, place, 1e5), record)
    assert ran.norm > 2000 * usual.norm
    suspect = TermPlace(micro_batch=place[0], row=place[1], position=place[2])
    gradloc = watching(model, alone, tau_of(usual, 10.0), loss, dtype=torch.bfloat16)
    report = gradloc.observe(ran.norm, ran.data, suspects=[suspect], record=record)
    assert located(report) == [place] and report is not None and report.passes == 2


@pytest.mark.parametrize("savings", [True, False])
def test_a_micro_batch_without_a_term_is_no_obstacle(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...], savings: bool
):
    loss, place = spiking_loss(), places(healthy)[30]
    gradloc = watching(model, alone, tau_of(run_step(model, loss, alone, healthy)), loss, cut_sequences=savings)
    planted = plant(healthy, place, 1e5)
    empty = replace(healthy[0], loss_mask=np.zeros_like(healthy[0].loss_mask))
    ran = run_step(model, loss, alone, (*planted, empty))
    assert located(gradloc.observe(ran.norm, ran.data)) == [place]


def test_a_hit_says_which_blocks_carry_it(model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]):
    loss = spiking_loss()
    place = places(healthy)[12]
    ran = run_step(model, loss, alone, plant(healthy, place, 1e5))
    report = watching(model, alone, tau_of(ran, 0.01), loss).observe(ran.norm, ran.data)
    assert located(report) == [place]
    assert report is not None
    hit = report.hits[0]
    assert hit.trajectory_id == healthy[place[0]].trajectory_ids[place[1]]
    assert hit.norm == pytest.approx(ran.norm, rel=1e-3)
    assert len(hit.block_norms) == 4
    assert sum(norm**2 for _, norm in hit.block_norms) == pytest.approx(hit.norm**2, rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_a_spike_of_all_tokens_is_never_located_and_a_healthy_step_is_left_alone(
    model: PolicyModel, alone: Ranks, seed: int
):
    step = on_policy(model, alone, random_step(seed))
    loss = spiking_loss()
    ran = run_step(model, loss, alone, step)
    gradloc = watching(model, alone, tau_of(ran), loss)
    assert gradloc.observe(ran.norm, ran.data) is None
    every = step
    for place in places(step):
        every = plant(every, place, 100.0)
    ran = run_step(model, loss, alone, every)
    report = gradloc.observe(ran.norm, ran.data)
    assert report is not None and report.outcome in (Outcome.DIFFUSE, Outcome.INCONCLUSIVE)


def test_a_budget_that_ends_is_inconclusive(model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]):
    loss = spiking_loss()
    ran = run_step(model, loss, alone, plant(healthy, places(healthy)[5], 1e5))
    report = watching(model, alone, tau_of(ran, 0.01), loss, budget_passes=4).observe(ran.norm, ran.data)
    assert report is not None and report.outcome is Outcome.INCONCLUSIVE and report.passes <= 4


def test_a_step_without_the_culprit_is_the_healthy_one_without_that_term(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    loss = spiking_loss()
    place = places(healthy)[20]
    planted = plant(healthy, place, 1e5)
    ran = run_step(model, loss, alone, planted)
    report = watching(model, alone, tau_of(ran, 0.01), loss).observe(ran.norm, ran.data)
    assert report is not None
    run_step(model, loss, alone, without_terms(planted, report.hits, 0))
    masked = gradients(model)
    healthy[place[0]].loss_mask[place[1], place[2]] = False
    try:
        run_step(model, loss, alone, healthy)
    finally:
        healthy[place[0]].loss_mask[place[1], place[2]] = True
    assert all(torch.equal(a, b) for a, b in zip(masked, gradients(model), strict=True))


def test_a_calibrated_threshold_waits_for_its_history_and_keeps_it(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    loss = spiking_loss()
    config = GradLocConfig(threshold=CalibratedTau(multiple=5.0, window_steps=10, warmup_steps=3))
    gradloc = GradLoc(config, model, loss, alone)
    usual = run_step(model, loss, alone, healthy)
    planted = plant(healthy, places(healthy)[8], 1e5)
    spiking = run_step(model, loss, alone, planted)
    assert gradloc.observe(spiking.norm, spiking.data) is None
    for _ in range(3):
        assert gradloc.observe(usual.norm, usual.data) is None
    again = GradLoc(config, model, loss, alone)
    again.load_state(gradloc.state())
    spiking = run_step(model, loss, alone, planted)
    for one in (gradloc, again):
        assert located(one.observe(spiking.norm, spiking.data)) == [places(healthy)[8]]


def test_steps_without_a_gradient_leave_the_threshold_as_it_is(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    gradloc = GradLoc(GradLocConfig(threshold=CalibratedTau(warmup_steps=2)), model, spiking_loss(), alone)
    data = StepData(micro_batches=healthy)
    for norm in (2.0, 0.0, 2.0, 0.0, 0.0, 0.0):
        assert gradloc.observe(norm, data) is None
    history = gradloc.state()["history"]
    assert len(history) == 2 and min(history) > 0


def test_suspects_alone_start_a_search_only_within_their_budget(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    loss = spiking_loss()
    place = places(healthy)[8]
    ran = run_step(model, loss, alone, plant(healthy, place, 1e5))
    gradloc = watching(model, alone, tau_of(ran, 1.5), loss, suspect_passes=2)
    suspects = [TermPlace(micro_batch=place[0], row=place[1], position=place[2])]
    reports = [gradloc.observe(ran.norm, ran.data, suspects=suspects) for _ in range(4)]
    assert [report is not None and report.trigger for report in reports] == ["suspects", "suspects", False, False]
    assert (
        watching(model, alone, tau_of(ran, 1.5), loss, suspect_passes=0).observe(ran.norm, ran.data, suspects=suspects)
        is None
    )


def test_steps_that_spike_are_searched_until_their_passes_are_spent(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    loss, place = spiking_loss(), places(healthy)[8]
    tau = tau_of(run_step(model, loss, alone, healthy))
    ran = run_step(model, loss, alone, plant(healthy, place, 1e5))
    gradloc = watching(model, alone, tau, loss, spike_passes=1)
    first, second = (gradloc.observe(ran.norm, ran.data) for _ in range(2))
    assert located(first) == [place] and first is not None and first.passes > 1, (
        "a search that has begun is not cut short"
    )
    assert second is not None and (second.outcome, second.trigger, second.hits, second.passes) == (
        Outcome.NOT_SEARCHED,
        "threshold",
        (),
        0,
    )
    assert second.threshold == first.threshold and second.tau == tau
    by_scale = watching(model, alone, 1e9, loss, spike_passes=1)
    by_scale.load_state({**gradloc.state(), "history": []})
    again = [
        by_scale.observe(ran.norm, ran.data, signs=StepSigns(smallest_scale=0.01)),
        by_scale.observe(math.nan, ran.data),
    ]
    assert [report and report.outcome for report in again[:1]] == [Outcome.NOT_SEARCHED], (
        "a checkpoint keeps what was spent, and both triggers share it"
    )
    assert again[1] is not None and again[1].outcome is not Outcome.NOT_SEARCHED, (
        "what is not finite is always searched"
    )


def test_passes_of_steps_long_ago_count_no_more(model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]):
    loss, place = spiking_loss(), places(healthy)[8]
    usual = run_step(model, loss, alone, healthy)
    ran = run_step(model, loss, alone, plant(healthy, place, 1e5))
    gradloc = watching(model, alone, tau_of(usual), loss, spike_passes=1)
    gradloc.observe(ran.norm, ran.data)
    for _ in range(WINDOW_STEPS - 2):
        gradloc.observe(usual.norm, usual.data)
    hundredth, next_one = (gradloc.observe(ran.norm, ran.data) for _ in range(2))
    assert hundredth is not None and hundredth.outcome is Outcome.NOT_SEARCHED
    assert located(next_one) == [place]


def test_a_later_step_with_more_micro_batches_than_passes_ends_no_run(
    model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]
):
    loss = spiking_loss()
    gradloc = watching(model, alone, tau_of(run_step(model, loss, alone, healthy)), loss, budget_passes=1)
    assert gradloc.observe(0.0, StepData(micro_batches=healthy[:1])) is None
    assert gradloc.observe(0.0, StepData(micro_batches=healthy)) is None
    ran = run_step(model, loss, alone, plant(healthy, places(healthy)[8], 1e5))
    report = gradloc.observe(ran.norm, ran.data)
    assert report is not None and (report.outcome, report.hits) == (Outcome.INCONCLUSIVE, ()) and report.passes <= 1


def test_bad_settings_are_refused_with_the_cure(model: PolicyModel, alone: Ranks, healthy: tuple[MicroBatch, ...]):
    for tau in (0.0, -1.0, float("inf")):
        with pytest.raises(ValidationError, match="expected a positive number"):
            GivenTau(tau=tau)
    with pytest.raises(
        UserError, match=r"budget_passes = 1, and the first step has 2 micro-batches; .* set it to 4 or more"
    ):
        watching(model, alone, 1.0, budget_passes=1).observe(0.1, StepData(micro_batches=healthy))


def test_the_config_costs_no_torch():
    check = "import sys; import trainer.config.gradloc; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", check], check=False, cwd=ROOT).returncode == 0
