"""What the doctor lays at the door of a leap of KL, and what not."""

from support.loop.doctor_runs import MadeUpRun, healthy, rescore

from orchestrator.doctor.diagnosis import diagnose
from orchestrator.metrics.causes import Cause


def steady(steps: int) -> MadeUpRun:
    """Neither better nor worse: nothing of the policy moves."""
    run = healthy(0, steps)
    for name, value in (
        ("reward_mean", 0.5),
        ("policy_entropy", 0.5),
        ("all_correct_groups", 0.1),
        ("all_wrong_groups", 0.1),
        ("zero_variance_groups", 0.2),
    ):
        run.set(name, lambda t, value=value: value)
    run.set("approx_kl", lambda t: 0.005)
    rescore(run, lambda t: 0.5)
    return run


def test_a_reward_that_falls_long_after_a_harmless_leap_is_no_collapse():
    run = steady(3000)
    run.rows[20]["approx_kl"] = 0.2
    run.set("reward_mean", lambda t: 0.1, since=2950)
    assert not [f for f in diagnose(run.record()).findings if f.cause is Cause.POLICY_COLLAPSE]


def test_a_leap_that_loses_the_reward_is_found_behind_a_harmless_one():
    run = steady(600)
    run.rows[20]["approx_kl"] = run.rows[400]["approx_kl"] = 0.2
    run.set("reward_mean", lambda t: 0.1, since=401)
    primary = diagnose(run.record()).primary
    assert primary is not None and (primary.cause, primary.since) == (Cause.POLICY_COLLAPSE, 401)


def test_a_reward_that_came_back_after_a_leap_is_no_collapse():
    run = steady(600)
    run.rows[20]["approx_kl"] = 0.2
    for row in run.rows[21:60]:
        row["reward_mean"] = 0.1
    assert not [f for f in diagnose(run.record()).findings if f.cause is Cause.POLICY_COLLAPSE]
