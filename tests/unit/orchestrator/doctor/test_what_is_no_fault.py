"""What looks like a fault and is none, or is another one: old events, learning, prompts learned by heart, a policy that
was lost."""

import math

import pytest
from support.loop.doctor_runs import healthy, rescore
from support.loop.doctor_scenarios import (
    evaluation_changes,
    gradient_spikes,
    groups_of,
    policy_collapses,
    reward_flips,
    reward_grows_better,
)

from orchestrator.doctor.diagnosis import diagnose
from orchestrator.doctor.findings import Severity
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import record_of_rows
from rollout.errors import ConcordError


def test_scores_of_two_configurations_are_never_one_trend():
    """Five good scores, then five bad ones under another template: a change of the evaluation, not a reward that came
    loose."""
    run = healthy(0)
    rescore(run, lambda t: 0.55 + 0.4 * t if t < 0.5 else 0.2)
    evaluation_changes(run)
    assert diagnose(run.record()).findings[0].cause is Cause.EVALUATION_CHANGED
    assert not [f for f in diagnose(run.record()).findings if f.cause in (Cause.REWARD_INVERTED, Cause.REWARD_DETACHED)]


def test_an_evaluation_that_is_lost_within_a_few_steps_tells_of_an_inverted_reward():
    """Solved by the flipped reward long before the end: most scores are 0, and a line through all of them is flat."""
    run = healthy(0, 60)
    run.set("reward_mean", lambda t: min(1.0, 0.4 + 2.5 * t))
    for name in ("all_correct_groups", "zero_variance_groups"):
        run.set(name, lambda t: min(1.0, 0.2 + 2.5 * t))
    run.events.clear()
    for index, score in enumerate((0.53, 0.22, 0.14, 0.03, 0.02, *[0.0] * 8)):
        run.event(
            "evaluation",
            5 * index,
            score=score,
            stderr=math.sqrt(score * (1 - score) / 64),
            version=5 * index,
            fingerprint="a",
        )
    found = diagnose(run.record())
    assert [finding.cause for finding in found.findings if finding.severity is not Severity.INFO] == [
        Cause.REWARD_INVERTED
    ]


def test_a_last_unsolved_group_among_solved_ones_makes_no_spike():
    run = healthy(0, 200)
    run.set("grad_norm", lambda t: 0.01, since=120)
    run.rows[-4]["grad_norm"] = 0.9
    assert not [f for f in diagnose(run.record()).findings if f.cause is Cause.GRADIENT_SPIKE]


def test_a_step_that_was_skipped_on_request_is_not_called_non_finite():
    run = healthy(0)
    run.event("step_skipped", len(run.rows), reason="gradloc found 1 tokens behind the norm")
    assert diagnose(run.record()).primary is None


def test_a_skipped_step_names_a_batch_that_is_still_there():
    run = healthy(0)
    for number, (saved, removed) in enumerate((("30", ""), ("30-2", "30"), ("30-3", ""))):
        run.event("step_skipped", 100 + number, reason="non-finite loss (nan)", saved=saved, removed=removed)
    primary = diagnose(run.record()).primary
    assert primary is not None and "`concord replay RUN 30-2`" in primary.summary


def test_a_spike_names_the_token_that_a_search_found():
    run = healthy(0)
    gradient_spikes(run)
    run.event(
        "gradloc",
        len(run.rows) - 5,
        step=len(run.rows) - 4,
        outcome="located",
        culprits=1,
        token_text="7",
        trajectory_id="d00000012-3",
    )
    run.event(
        "gradloc",
        len(run.rows) - 5,
        step=len(run.rows) - 4,
        outcome="diffuse",
        culprits=9,
        token_text="8",
        trajectory_id="d00000013-3",
    )
    run.event(
        "gradloc",
        len(run.rows) - 1,
        step=len(run.rows),
        outcome="located",
        culprits=1,
        token_text="9",
        trajectory_id="d00000014-3",
    )
    primary = diagnose(run.record()).primary
    assert primary is not None and "token '7' of d00000012-3" in primary.summary


def test_what_lies_long_back_is_only_info():
    run = healthy(0, 400)
    run.event("replica_failed", 20, replica=0, reason="gone")
    found = diagnose(run.record())
    assert found.primary is None
    assert [f.severity for f in found.findings if f.cause is Cause.REPLICA_FAILURES] == [Severity.INFO]


def test_a_change_of_the_evaluation_that_lies_long_back_hides_nothing_newer():
    run = healthy(0, 500)
    evaluation_changes(run)
    run.event("step_skipped", 495, reason="non-finite gradient (norm nan)")
    found = diagnose(run.record())
    assert found.primary is not None and found.primary.cause is Cause.NON_FINITE
    assert [f.severity for f in found.findings if f.cause is Cause.EVALUATION_CHANGED] == [Severity.INFO]


def test_a_policy_that_collapses_within_two_steps_is_no_hard_prompt():
    """KL leaps once; afterwards nothing moves any more, and no group has a right answer."""
    run = healthy(0)
    for name, value in (("reward_mean", 0.0), ("policy_entropy", 0.0), ("all_correct_groups", 0.0), ("approx_kl", 0.0)):
        run.set(name, lambda t, value=value: value, since=40)
    for name in ("all_wrong_groups", "zero_variance_groups"):
        run.set(name, lambda t: 1.0, since=40)
    run.rows[40]["approx_kl"] = 5.1
    found = diagnose(run.record())
    assert found.primary is not None
    assert (found.primary.cause, found.primary.since) == (Cause.POLICY_COLLAPSE, 41)


@pytest.mark.parametrize("evaluated", [True, False])
def test_kl_up_and_entropy_down_with_a_better_reward_is_only_info(evaluated: bool):
    run = healthy(0)
    policy_collapses(run)
    reward_grows_better(run, evaluated)
    found = diagnose(run.record())
    assert found.primary is None
    assert [f.severity for f in found.findings if f.cause is Cause.POLICY_COLLAPSE] == [Severity.INFO]


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_run_that_is_solved_from_the_start_is_solved_and_nothing_worse(evaluated: bool):
    run = healthy(0)
    events = run.events[:]
    groups_of(wrong=0.0, right=0.9, reward=0.98)(run)
    if evaluated:
        run.events = events
        rescore(run, lambda t: 0.98)
    found = diagnose(run.record())
    assert [(f.cause, f.severity) for f in found.findings if f.cause is not Cause.TRAINER_WAITS] == [
        (Cause.SOLVED, Severity.INFO)
    ]
    assert "90% of the trained groups are solved by every sample (mean reward 0.98), most of them from the start" in (
        found.findings[0].summary
    )


def test_a_reward_that_every_answer_gets_and_no_evaluation_confirms_is_not_called_solved():
    run = healthy(0)
    reward_flips(run)
    run.set("all_correct_groups", lambda t: 0.9 * t)
    assert Cause.SOLVED not in [f.cause for f in diagnose(run.record()).findings]


@pytest.mark.parametrize(("wrong", "right"), [(0.85, 0.0), (0.475, 0.475)])
def test_a_policy_that_was_lost_says_nothing_of_its_prompts(wrong: float, right: float):
    run = healthy(0)
    groups_of(wrong, right, 0.03)(run)
    for row in run.rows[:40]:
        row |= {"reward_mean": 0.5, "all_wrong_groups": 0.1, "all_correct_groups": 0.1, "zero_variance_groups": 0.2}
    assert not [f for f in diagnose(run.record()).findings if f.cause in (Cause.WRONG_DIFFICULTY, Cause.GROUPS_ALIKE)]


@pytest.mark.parametrize("evaluated", [True, False])
def test_answers_that_grow_without_an_evaluation_are_only_info(evaluated: bool):
    run = healthy(0)
    run.set("length_mean", lambda t: 400 + 800 * t)
    reward_grows_better(run, evaluated)
    found = diagnose(run.record())
    assert found.primary is None
    assert [f.severity for f in found.findings if f.cause is Cause.LENGTH_GROWTH] == (
        [] if evaluated else [Severity.INFO]
    )


def test_a_handful_of_prompts_learned_by_heart_is_no_inverted_reward():
    run = healthy(0)
    reward_flips(run)
    run.set("distinct_prompts", lambda t: 0.1)
    assert not [f for f in diagnose(run.record()).findings if f.cause is Cause.REWARD_INVERTED]


def test_scores_of_one_version_alone_have_no_trend():
    run = healthy(0)
    run.events = [type(e)(kind=e.kind, step=e.step, fields={**e.fields, "version": 5}) for e in run.events]
    assert diagnose(run.record()).primary is None


def test_a_record_without_rows_gives_no_finding():
    assert diagnose(record_of_rows([])).findings == ()


def test_a_column_that_is_not_declared_is_refused():
    with pytest.raises(ConcordError, match="catalogue"):
        healthy(0).record().column("reward")
