"""What the doctor says of a run that makes no steps: the reason, where it comes from, and right numbers."""

from typing import Any

import pytest
from support.loop.doctor_runs import healthy
from support.loop.doctor_scenarios import prompts_are_hard

from orchestrator.doctor.diagnosis import Diagnosis, diagnose
from orchestrator.doctor.findings import Severity
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.history import FailureKind, History, How, RunEnd
from orchestrator.run_dir.record import RunEvent, record_of_rows

PLACE = "/home/u/graded.py:4 in reward"
RAISED = FailureKind(
    reason="reward_raised", place=PLACE, detail=f"the reward raised: ValueError: boom (at {PLACE})", count=500
)


def without_steps(*events: RunEvent, **fields: Any) -> Diagnosis:
    return diagnose(record_of_rows([], events=events, history=History(**fields)))


def said(found: Diagnosis) -> list[tuple[Cause, Severity]]:
    return [(finding.cause, finding.severity) for finding in found.findings]


def test_a_reward_that_raises_on_every_sample_is_critical_before_any_step():
    found = without_steps(dispatched=509, failed={"reward_raised": 500}, in_a_row=500, kinds=(RAISED,))
    assert said(found) == [(Cause.REWARD_FAILURES, Severity.CRITICAL), (Cause.NO_STEP, Severity.INFO)]
    assert found.primary is not None
    assert "500 of 500 dispatches that ended so far failed (reward_raised)" in found.primary.summary
    assert "most often (500 times) reward_raised: the reward raised: ValueError: boom" in found.primary.summary
    assert found.primary.evidence[0].note == PLACE


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("engine", Cause.ENGINE_FAILURES),
        ("environment", Cause.ENVIRONMENT_FAILURES),
        ("deadline", Cause.EPISODE_DEADLINE),
        ("worker", Cause.WORKER_LOST),
        ("reward_timeout", Cause.REWARD_FAILURES),
        ("reward_worker_died", Cause.REWARD_WORKER),
    ],
)
def test_whatever_fails_every_dispatch_is_named(reason: str, cause: Cause):
    found = without_steps(dispatched=100, failed={reason: 91}, in_a_row=91)
    assert said(found)[0] == (cause, Severity.CRITICAL)


def test_failures_after_the_newest_step_are_seen_and_no_share_exceeds_one():
    """Its rows are healthy; then every request is refused. The numbers were "89712 of 530 dispatches"."""
    run = healthy(0)
    dispatched = int(run.rows[-1]["dispatched"])
    run.history = History(
        dispatched=dispatched + 89_760, came_back=dispatched, failed={"engine": 89_712}, in_a_row=89_712, version=120
    )
    found = diagnose(run.record())
    assert found.primary is not None
    assert (found.primary.cause, found.primary.severity) == (Cause.ENGINE_FAILURES, Severity.CRITICAL)
    assert found.primary.since == 120
    assert "89712 of 90032 dispatches that ended since step 100 failed" in found.primary.summary


def test_the_newest_kind_of_failure_is_named_and_not_one_of_long_ago():
    run = healthy(0)
    dispatched = int(run.rows[-1]["dispatched"])
    old = FailureKind(reason="reward_raised", place="", detail="old", count=900, first_step=1, last_step=9)
    new = FailureKind(reason="reward_raised", place=PLACE, detail="new", count=90, first_step=119, last_step=120)
    run.end("failed:reward_raised", 9.0)
    for tally in run.tallies[100:]:
        tally["failed:reward_raised"] = 900.0
    run.history = History(dispatched=dispatched, came_back=940, failed={"reward_raised": 990}, kinds=(old, new))
    primary = diagnose(run.record()).primary
    assert primary is not None and "most often (90 times) reward_raised: new" in primary.summary


def test_few_failures_of_a_healthy_run_are_no_finding():
    run = healthy(0)
    dispatched = int(run.rows[-1]["dispatched"])
    run.history = History(
        dispatched=dispatched, came_back=dispatched - 20, failed={"engine": 2, "reward_raised": 2}, version=120
    )
    assert diagnose(run.record()).primary is None


def test_solved_is_told_apart_from_not_learning_and_both_from_what_nobody_can_say_yet():
    failing = without_steps(dispatched=100, failed={"engine": 91}, in_a_row=91)
    hard = healthy(0)
    prompts_are_hard(hard)
    found = [failing, diagnose(hard.record()), diagnose(healthy(0).record()), diagnose(healthy(0, 12).record())]
    assert [one.learning.value for one in found] == ["not_learning", "not_learning", "solved", "open"]


@pytest.mark.parametrize("how", [How.FINISHED, How.STOPPED, How.INTERRUPTED])
def test_a_run_that_ended_as_somebody_wished_is_no_finding(how: How):
    run = healthy(0)
    run.ended(how)
    assert diagnose(run.record()).primary is None


def test_a_limit_that_ended_the_run_makes_its_failures_critical():
    run = healthy(0)
    run.end("failed:environment", 4.0)
    run.ended(How.FAILURES, "80 of the 100 dispatches ... failed")
    primary = diagnose(run.record()).primary
    assert primary is not None and (primary.cause, primary.severity) == (Cause.ENVIRONMENT_FAILURES, Severity.CRITICAL)
    assert "and that ended the run" in primary.summary


def test_a_run_that_ended_for_want_of_a_step_is_critical_with_what_it_waited_for():
    found = without_steps(end=RunEnd(how=How.STALLED, reason="no step finished: training waits for 16 groups"))
    assert said(found) == [(Cause.NO_STEP, Severity.CRITICAL)]
    assert "training waits for 16 groups" in found.findings[0].summary


def test_a_silence_counts_until_the_next_step():
    run = healthy(0)
    run.event("no_step", 119, silence_s=150.0, waits="training waits for 16 groups")
    assert diagnose(run.record()).primary is None
    run.event("no_step", 120, silence_s=160.0, waits="training waits for the trainer to finish step 121")
    primary = diagnose(run.record()).primary
    assert primary is not None and (primary.cause, primary.severity) == (Cause.NO_STEP, Severity.WARN)
    assert "no step for 160 s: training waits for the trainer to finish step 121" in primary.summary


def test_starts_that_came_to_nothing_are_counted():
    found = without_steps(version=40, starts=(0, 40, 40, 40), end=RunEnd(how=How.ERROR, reason="CUDA out of memory"))
    assert found.findings[0].summary == (
        "an error ended the run (the last 3 starts made no step) at version 40: CUDA out of memory"
    )
