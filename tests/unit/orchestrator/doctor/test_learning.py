"""A run that is trained away from its reward, or learns nothing, has a finding; one that learns slowly, warms up or is
solved has none."""

import pytest
from support.loop.doctor_runs import healthy, rescore
from support.loop.doctor_scenarios import noisily, nothing_is_learned, reward_is_lost, steady

from orchestrator.doctor.diagnosis import diagnose
from orchestrator.doctor.findings import Severity
from orchestrator.metrics.causes import Cause

NOT_LEARNED = (Cause.NOTHING_LEARNED, Cause.POLICY_STILL, Cause.REWARD_FALLS)


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_reward_that_falls_is_critical_with_the_evaluation_and_a_warning_without(evaluated: bool):
    run = healthy(0, 60)
    reward_is_lost(run)
    if not evaluated:
        run.events.clear()
    primary = diagnose(run.record()).primary
    assert primary is not None
    assert (primary.cause, primary.severity) == (Cause.REWARD_FALLS, Severity.CRITICAL if evaluated else Severity.WARN)
    numbers = dict(primary.evidence[0].numbers)
    assert numbers["from"] > 0.4 and numbers["to"] < 0.05
    assert primary.since < 30


def test_a_reward_that_falls_because_prompts_grow_harder_is_info():
    run = healthy(0)
    reward_is_lost(run)
    rescore(run, lambda t: 0.3 + 0.5 * t)
    found = diagnose(run.record())
    assert found.primary is None
    assert [one.severity for one in found.findings if one.cause is Cause.REWARD_FALLS] == [Severity.INFO]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gain", [0.15, 0.3])
def test_slow_learning_is_learning(gain: float, seed: int):
    run = healthy(seed)
    nothing_is_learned(run)
    run.set("reward_mean", noisily(lambda t: 0.4 + gain * t, 0.03, seed))
    rescore(run, lambda t: 0.4 + gain * t)
    assert not [one for one in diagnose(run.record()).findings if one.cause in NOT_LEARNED]


def test_a_plateau_after_a_rise_is_no_run_that_learned_nothing():
    run = healthy(0, 400)
    steady(run, lambda t: 0.4 + 0.3 * min(1.0, 20 * t))
    assert not [one for one in diagnose(run.record()).findings if one.cause in NOT_LEARNED]


def test_while_the_learning_rate_warms_up_nothing_is_said():
    run = healthy(0, 60)
    nothing_is_learned(run)
    assert Cause.NOTHING_LEARNED in [one.cause for one in diagnose(run.record()).findings]
    run.set("learning_rate", lambda t: 1e-3 * t)
    assert diagnose(run.record()).primary is None


def test_a_plateau_in_a_resumed_run_is_info():
    run = healthy(0)
    nothing_is_learned(run)
    for row in run.rows:
        row["step"] += 500
    found = diagnose(run.record())
    assert found.primary is None
    assert [one.severity for one in found.findings if one.cause is Cause.NOTHING_LEARNED] == [Severity.INFO]


@pytest.mark.parametrize(("environment", "top_k", "primary"), [("arithmetic", 0, True), ("arithmetic", 1, False)])
def test_a_reward_below_a_greedy_evaluation_is_no_warning(environment: str, top_k: int, primary: bool):
    run = healthy(0)
    steady(run, lambda t: 0.3 + 0.2 * t)
    rescore(run, lambda t: 0.5 + 0.2 * t)
    sampling = f'{{"temperature":1.0,"top_k":{top_k},"top_p":1.0}}'
    parts = {"part_environment": environment, "part_sampling": sampling}
    run.events = [type(e)(kind=e.kind, step=e.step, fields={**e.fields, **parts}) for e in run.events]
    found = diagnose(run.record())
    assert Cause.REWARD_OFF_EVALUATION in [one.cause for one in found.findings]
    assert (found.primary is not None) is primary


def test_a_reward_that_is_lost_within_the_first_ten_rows_falls_too():
    """Within the window the rewards differ because they fall, not by chance."""
    run = healthy(0, 40)
    steady(run, lambda t: 0.4)
    for row, reward in zip(run.rows, (0.28, 0.36, 0.47, 0.25, 0.17, 0.22, 0.08, 0.14, 0.03, 0.03), strict=False):
        row["reward_mean"] = reward
    for row in run.rows[10:]:
        row |= {"reward_mean": 0.0, "reward_std": 0.05, "zero_variance_groups": 1.0, "all_wrong_groups": 1.0}
    run.events.clear()
    primary = diagnose(run.record()).primary
    assert primary is not None and primary.cause is Cause.REWARD_FALLS


@pytest.mark.parametrize(("rise", "cause"), [(0.1, Cause.REWARD_INVERTED), (0.0, Cause.REWARD_DETACHED)])
def test_an_evaluation_that_is_lost_is_a_fault_of_the_reward_where_that_does_not_fall(rise: float, cause: Cause):
    run = healthy(0)
    steady(run)
    run.set("reward_mean", lambda t: 0.65 + rise * t + 0.02 * (-1) ** round(119 * t))
    rescore(run, lambda t: max(0.05, 0.6 - 2.0 * t))
    primary = diagnose(run.record()).primary
    assert primary is not None and (primary.cause, primary.severity) == (cause, Severity.CRITICAL)


def test_few_prompts_that_are_solved_by_heart_are_few_and_not_easy():
    run = healthy(0)
    run.set("distinct_prompts", lambda t: 0.1)
    run.set("all_correct_groups", lambda t: min(0.97, 4 * t))
    run.set("zero_variance_groups", lambda t: min(0.97, 4 * t))
    run.set("reward_mean", noisily(lambda t: min(0.99, 0.4 + 2 * t), 0.01))
    rescore(run, lambda t: 0.3)
    primary = diagnose(run.record()).primary
    assert primary is not None and primary.cause is Cause.FEW_PROMPTS
