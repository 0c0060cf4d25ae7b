"""What came first in time, and what explains the others, is looked at first."""

import pytest
from support.loop.doctor_runs import MadeUpRun, healthy, rescore
from support.loop.doctor_scenarios import gap_by, gradient_spikes, judged_otherwise, noisily, nothing_is_learned, steady

from orchestrator.doctor.diagnosis import diagnose
from orchestrator.doctor.findings import Severity
from orchestrator.metrics.causes import Cause

LOST = 2
"""Row after which nothing is right any more."""


def lost_at_once(seed: int, right: float) -> MadeUpRun:
    """A learning rate of 1e-2: two steps, and the policy is gone; `right` of the groups stay solved by chance."""
    run = healthy(seed, 60)
    steady(run)
    run.set("reward_mean", lambda t: right, since=LOST)
    run.set("all_wrong_groups", lambda t: 1.0 - right, since=LOST)
    run.set("all_correct_groups", lambda t: right, since=LOST)
    run.set("zero_variance_groups", lambda t: 1.0, since=LOST)
    run.set("policy_entropy", noisily(lambda t: 0.1, 0.01), since=LOST)
    run.rows[1]["approx_kl"] = 0.9
    rescore(run, lambda t: right)
    return run


@pytest.mark.parametrize("right", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_a_collapse_within_the_first_ten_rows_is_neither_hard_prompts_nor_groups_alike(seed: int, right: float):
    found = [one for one in diagnose(lost_at_once(seed, right).record()).findings if one.severity is not Severity.INFO]
    assert [(one.cause, one.since) for one in found] == [(Cause.POLICY_COLLAPSE, 2)]


def test_a_warning_of_layer_1_does_not_stand_above_a_critical_finding_of_layer_2_that_began_earlier():
    run = lost_at_once(0, 0.0)
    run.end("failed:reward_raised", 4.0, since=30)
    found = [one.cause for one in diagnose(run.record()).findings if one.severity is not Severity.INFO]
    assert found == [Cause.POLICY_COLLAPSE, Cause.REWARD_FAILURES]


def test_a_block_that_is_frozen_from_the_start_stands_before_that_nothing_is_learned():
    run = healthy(0)
    nothing_is_learned(run)
    for block, norm in (("embeddings", 0.0), ("layers.0", 0.3)):
        run.blocks["block_grad_norm", block] = {int(row["step"]): norm for row in run.rows}
    found = [one.cause for one in diagnose(run.record()).findings if one.severity is not Severity.INFO]
    assert found == [Cause.FROZEN_BLOCK, Cause.NOTHING_LEARNED]


def test_a_disagreement_stands_before_a_spike_that_came_after_it():
    run = healthy(0)
    gap_by("unknown")(run)
    gradient_spikes(run)
    found = [one.cause for one in diagnose(run.record()).findings if one.severity is not Severity.INFO]
    assert found == [Cause.UNKNOWN_GAP, Cause.GRADIENT_SPIKE]


def test_a_reward_that_lies_off_the_evaluation_from_the_start_stands_before_the_difficulty_that_it_feigns():
    run = healthy(0)
    judged_otherwise(run)
    run.set("reward_mean", noisily(lambda t: 0.1, 0.005))
    run.set("all_wrong_groups", lambda t: 0.7)
    run.set("zero_variance_groups", lambda t: 0.7)
    found = [one.cause for one in diagnose(run.record()).findings if one.severity is not Severity.INFO]
    assert found == [Cause.REWARD_OFF_EVALUATION, Cause.WRONG_DIFFICULTY]
