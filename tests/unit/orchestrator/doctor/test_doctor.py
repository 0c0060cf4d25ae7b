"""The doctor's rules on made-up runs: the right cause first, quiet where nothing is wrong, and advice that fits the
layer."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from support.loop.doctor_runs import MadeUpRun, healthy, rescore

from orchestrator.doctor.advice import ADVICE, LAYER_3_TOOLS
from orchestrator.doctor.diagnosis import RULES, diagnose
from orchestrator.doctor.findings import Severity
from orchestrator.doctor.tables import DO_NOT
from orchestrator.metrics.causes import LAYER, Cause
from orchestrator.run_dir.record import record_of_rows
from rollout.errors import ConcordError

SEEDS = range(5)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("steps", [30, 120, 400])
def test_a_healthy_run_gives_nothing_worse_than_info(seed: int, steps: int):
    found = diagnose(healthy(seed, steps).record())
    assert found.primary is None, found.findings[0].summary
    assert found.untrusted == ()


def test_entropy_that_falls_with_solved_groups_is_layer_1_and_no_alarm():
    found = diagnose(healthy(0).record())
    assert (Cause.SOLVED, 1, Severity.INFO) in [(f.cause, f.layer, f.severity) for f in found.findings]
    assert found.primary is None


def known_story(run: MadeUpRun, seed: int) -> None:
    """Reward .30 -> .80, evaluation flat, length 400 -> 1,200, NaN at the end; all of it with the noise of a run."""
    random = np.random.default_rng(seed)
    run.set("reward_mean", lambda t: 0.3 + 0.5 * t + random.normal(0, 0.02))
    for name in ("all_correct_groups", "zero_variance_groups"):
        run.set(name, lambda t: 0.2 * t)
    run.set("length_mean", lambda t: 400 + 800 * t + random.normal(0, 30))
    run.set("reward_length_correlation", lambda t: math.nan)
    rescore(run, lambda t: 0.3 + random.normal(0, 0.03))
    run.set("grad_norm", lambda t: math.nan, since=len(run.rows) - 1)
    run.event("step_skipped", len(run.rows), reason="non-finite gradient (norm nan)")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_known_story_is_layer_1_first_and_layer_3_second(seed: int):
    run = healthy(seed)
    known_story(run, seed)
    found = diagnose(run.record())
    assert found.primary is not None
    assert (found.primary.cause, found.primary.layer, found.primary.severity) == (
        Cause.LENGTH_REWARD,
        1,
        Severity.CRITICAL,
    )
    worse = [finding for finding in found.findings if finding.severity is not Severity.INFO]
    assert [(finding.cause, finding.layer) for finding in worse] == [(Cause.LENGTH_REWARD, 1), (Cause.NON_FINITE, 3)]
    advised = [text for finding in worse for text in finding.advice.do]
    assert not [text for text in advised if "learning rate" in text or "learning_rate" in text]
    assert not [tool for tool in LAYER_3_TOOLS for text in found.primary.advice.do if tool.lower() in text.lower()]
    assert any("learning rate" in text for text in found.primary.advice.do_not)
    shown = {one.series: dict(one.numbers) for one in found.primary.evidence}
    assert shown["reward_mean"]["from"] == pytest.approx(0.34, abs=0.04)
    assert shown["reward_mean"]["to"] == pytest.approx(0.8, abs=0.03)
    assert shown["length_mean"]["to"] > 1100


def _length(run: MadeUpRun) -> None:
    run.set("length_mean", lambda t: 4 + 3 * t)
    run.set("reward_mean", lambda t: 0.5 + 0.4 * t)
    run.set("reward_length_correlation", lambda t: 0.4 + 0.55 * t)
    rescore(run, lambda t: 0.5 - 0.3 * t)


def _flip(run: MadeUpRun) -> None:
    run.set("reward_mean", lambda t: 0.55 + 0.4 * t)
    rescore(run, lambda t: 0.6 - 0.55 * t)


def _flat(run: MadeUpRun) -> None:
    run.set("zero_variance_groups", lambda t: 0.95, since=60)
    run.set("all_correct_groups", lambda t: 0.1)


def _easy(run: MadeUpRun) -> None:
    run.set("distinct_prompts", lambda t: 0.1)
    run.set("all_correct_groups", lambda t: 0.97)
    run.set("zero_variance_groups", lambda t: 0.97)
    run.set("reward_mean", lambda t: 0.99)
    run.set("policy_entropy", lambda t: 0.05)
    rescore(run, lambda t: 0.5)


def _hard(run: MadeUpRun) -> None:
    run.set("all_wrong_groups", lambda t: 0.98)
    run.set("zero_variance_groups", lambda t: 0.98)
    run.set("all_correct_groups", lambda t: 0.0)
    run.set("reward_mean", lambda t: 0.01)
    rescore(run, lambda t: 0.01)


def _detached(run: MadeUpRun) -> None:
    run.set("reward_mean", lambda t: 0.3 + 0.5 * t)
    for name in ("all_correct_groups", "zero_variance_groups"):
        run.set(name, lambda t: 0.2 * t)
    rescore(run, lambda t: 0.45)


def _changed(run: MadeUpRun) -> None:
    run.events = [
        type(e)(
            kind=e.kind,
            step=e.step,
            fields={**e.fields, **({"fingerprint": "other", "part_chat_template": "b"} if e.step > 60 else {})},
        )
        for e in run.events
    ]


def _groups(wrong: float, right: float, reward: float) -> Callable[[MadeUpRun], None]:
    """From the start to the end these shares of groups are lost and solved, and the rest differ; nothing is
    evaluated."""

    def change(run: MadeUpRun) -> None:
        random = np.random.default_rng(len(run.rows))
        run.set("all_wrong_groups", lambda t: wrong)
        run.set("all_correct_groups", lambda t: right)
        run.set("zero_variance_groups", lambda t: wrong + right)
        run.set("reward_mean", lambda t: reward + random.normal(0, 0.005))
        run.set("policy_entropy", lambda t: 0.5)
        run.events.clear()

    return change


def _checked(**fields: object) -> Callable[[MadeUpRun], None]:
    known = {
        "train_prompts": 100,
        "duplicates": 0,
        "evaluation_prompts": 64,
        "exact": 0,
        "by_ngrams": 0,
        "overlapping": 0,
        "example": "",
    }
    return lambda run: run.event("prompts_checked", 0, **{**known, **fields})


def _collapse(run: MadeUpRun) -> None:
    """The worked example: KL .193 -> .495, entropy .500 -> .199."""
    run.set("reference_kl", lambda t: 0.193 + 0.302 * t)
    run.set("policy_entropy", lambda t: 0.5 - 0.301 * t)
    run.set("reward_mean", lambda t: 0.5)
    run.set("all_correct_groups", lambda t: 0.1)
    rescore(run, lambda t: 0.5)


def _better(run: MadeUpRun, evaluated: bool) -> None:
    """The reward rises, and the evaluation with it where there is one."""
    run.set("reward_mean", lambda t: 0.3 + 0.5 * t)
    rescore(run, lambda t: 0.3 + 0.5 * t)
    if not evaluated:
        run.events.clear()


def _spike(run: MadeUpRun) -> None:
    run.rows[-5]["grad_norm"] = 900.0


def _block(run: MadeUpRun) -> None:
    for block in ("layers.0", "layers.1", "head"):
        run.blocks["block_grad_norm", block] = {int(row["step"]): 0.3 for row in run.rows}
    run.blocks["block_grad_norm", "layers.1"][len(run.rows) - 3] = 300.0
    run.rows[-3]["grad_norm"] = 300.0


def _gap(cause: str) -> Callable[[MadeUpRun], None]:
    return lambda run: run.event(
        "consistency_finding",
        20,
        cause=cause,
        replica=1,
        policy="e1-v20",
        gap_nats=0.4,
        explained=0.9,
        codes="gap_mean",
        detail="x",
    )


SCENARIOS: dict[Cause, Callable[[MadeUpRun], None]] = {
    Cause.EVALUATION_CHANGED: _changed,
    Cause.TRAIN_EVAL_OVERLAP: _checked(overlapping=8, exact=8, example="12+34="),
    Cause.DUPLICATE_PROMPTS: _checked(duplicates=30),
    Cause.ENVIRONMENT_FAILURES: lambda run: run.end("failed:environment", 4.0),
    Cause.REWARD_FAILURES: lambda run: run.end("failed:reward_raised", 4.0),
    Cause.REWARD_INVERTED: _flip,
    Cause.LENGTH_REWARD: _length,
    Cause.EASY_PROMPTS: _easy,
    Cause.HARD_PROMPTS: _hard,
    Cause.WRONG_DIFFICULTY: _groups(wrong=0.85, right=0.0, reward=0.03),
    Cause.FLAT_REWARD: _flat,
    Cause.GROUPS_ALIKE: _groups(wrong=0.475, right=0.475, reward=0.5),
    Cause.REWARD_DETACHED: _detached,
    Cause.POLICY_COLLAPSE: _collapse,
    Cause.NON_FINITE: lambda run: run.set("loss", lambda t: math.inf, since=len(run.rows) - 2),
    Cause.GRADIENT_SPIKE: _spike,
    Cause.ATTENTION_LOGITS: lambda run: run.set("max_attention_logit", lambda t: 140.0, since=len(run.rows) - 3),
    Cause.BLOCK_IMBALANCE: _block,
    Cause.GRADIENT_COLLAPSE: lambda run: (
        run.set("grad_norm", lambda t: 1e-5, since=60),
        run.set("zero_variance_groups", lambda t: 0.2),
    )[0],
    **{
        Cause(name): _gap(name)
        for name in ("tokenizer", "logprob_semantics", "weight_sync", "version_tag", "routing", "precision", "stale_kv")
    },
    Cause.LOW_PROBABILITY_TAIL: _gap("low_probability_tail"),
    Cause.UNKNOWN_GAP: _gap("unknown"),
    Cause.GAP_DRIFT: lambda run: run.event("consistency_drift", 50, replica=0, detail="doubled"),
    Cause.ROUTING_INCOMPLETE: lambda run: run.event("routing_incomplete", 50, replica=0, coverage=0.5),
    Cause.ENGINE_FAILURES: lambda run: run.end("failed:engine", 2.0),
    Cause.REPLICA_FAILURES: lambda run: run.event("replica_failed", 50, replica=0, reason="its engine core is dead"),
    Cause.REWARD_WORKER: lambda run: run.end("failed:reward_worker_died", 1.0),
    Cause.WORKER_LOST: lambda run: run.event("worker_lost", 50, worker=0, detail="killed"),
    Cause.SLOW_REPLICA: lambda run: run.set("replica_slowness", lambda t: 3.0, since=90),
    Cause.STALE_WORK: lambda run: run.end("rejected:stale", 8.0),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cause", SCENARIOS, ids=str)
def test_what_went_wrong_is_the_primary_finding(cause: Cause, seed: int):
    run = healthy(seed)
    SCENARIOS[cause](run)
    found = diagnose(run.record())
    assert found.primary is not None
    assert (found.primary.cause, found.primary.layer) == (cause, LAYER[cause]), [f.summary for f in found.findings]
    assert found.primary.evidence and all(one.numbers for one in found.primary.evidence)


def test_every_cause_has_a_scenario_a_rule_and_advice():
    assert set(RULES) == set(Cause) == set(ADVICE)
    assert set(SCENARIOS) | {Cause.SOLVED, Cause.LENGTH_GROWTH} == set(Cause)
    assert list(RULES) == list(Cause), "rules stand in causal order"
    assert all(advice.do and advice.do_not for advice in ADVICE.values())


def test_every_text_of_what_not_to_do_says_so():
    assert not [text for advice in ADVICE.values() for text in advice.do_not if not text.startswith(DO_NOT)]


def test_no_layer_3_tool_is_advised_for_a_layer_1_cause():
    advised = " ".join(text for cause, advice in ADVICE.items() if LAYER[cause] == 1 for text in advice.do).lower()
    assert not [tool for tool in LAYER_3_TOOLS if tool.lower() in advised]
    worse = [cause for cause in Cause if LAYER[cause] == 1 and cause is not Cause.SOLVED]
    assert not [cause for cause in worse if not any("gradient clip" in text for text in ADVICE[cause].do_not)]


def test_disagreement_marks_ratios_untrusted_and_outranks_a_policy_finding_that_rests_on_them():
    run = healthy(0)
    _collapse(run)
    _gap("precision")(run)
    found = diagnose(run.record())
    assert [finding.cause for finding in found.findings if finding.severity is not Severity.INFO] == [
        Cause.PRECISION,
        Cause.POLICY_COLLAPSE,
    ]
    assert {"approx_kl", "policy_entropy", "correction_ess"} <= set(found.untrusted)


def test_an_upstream_finding_outranks_a_downstream_one():
    run = healthy(0)
    _gap("weight_sync")(run)
    _spike(run)
    _length(run)
    found = [finding for finding in diagnose(run.record()).findings if finding.severity is not Severity.INFO]
    assert [finding.layer for finding in found] == sorted(finding.layer for finding in found)
    assert found[0].cause is Cause.LENGTH_REWARD


def test_scores_of_two_configurations_are_never_one_trend():
    """Five good scores, then five bad ones under another template: a change of the evaluation, not a reward that came
    loose."""
    run = healthy(0)
    rescore(run, lambda t: 0.55 + 0.4 * t if t < 0.5 else 0.2)
    _changed(run)
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


def test_a_spike_names_the_token_that_a_search_found():
    run = healthy(0)
    _spike(run)
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


def test_what_lies_long_back_is_told_as_info():
    run = healthy(0, 400)
    run.event("replica_failed", 20, replica=0, reason="gone")
    found = diagnose(run.record())
    assert found.primary is None
    assert [f.severity for f in found.findings if f.cause is Cause.REPLICA_FAILURES] == [Severity.INFO]


def test_a_change_of_the_evaluation_that_lies_long_back_hides_nothing_newer():
    run = healthy(0, 500)
    _changed(run)
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
def test_kl_up_and_entropy_down_with_a_better_reward_is_told_as_info(evaluated: bool):
    run = healthy(0)
    _collapse(run)
    _better(run, evaluated)
    found = diagnose(run.record())
    assert found.primary is None
    assert [f.severity for f in found.findings if f.cause is Cause.POLICY_COLLAPSE] == [Severity.INFO]


@pytest.mark.parametrize("evaluated", [True, False])
def test_prompts_that_were_solved_from_the_start_are_of_the_wrong_difficulty(evaluated: bool):
    run = healthy(0)
    events = run.events[:]
    _groups(wrong=0.0, right=0.9, reward=0.98)(run)
    if evaluated:
        run.events = events
        rescore(run, lambda t: 0.98)
    primary = diagnose(run.record()).primary
    assert primary is not None and (primary.cause, primary.severity) == (Cause.WRONG_DIFFICULTY, Severity.WARN)


@pytest.mark.parametrize(("wrong", "right"), [(0.85, 0.0), (0.475, 0.475)])
def test_a_policy_that_was_lost_says_nothing_of_its_prompts(wrong: float, right: float):
    run = healthy(0)
    _groups(wrong, right, 0.03)(run)
    for row in run.rows[:40]:
        row |= {"reward_mean": 0.5, "all_wrong_groups": 0.1, "all_correct_groups": 0.1, "zero_variance_groups": 0.2}
    assert not [f for f in diagnose(run.record()).findings if f.cause in (Cause.WRONG_DIFFICULTY, Cause.GROUPS_ALIKE)]


@pytest.mark.parametrize("evaluated", [True, False])
def test_answers_that_grow_without_an_evaluation_are_told_as_info(evaluated: bool):
    run = healthy(0)
    run.set("length_mean", lambda t: 400 + 800 * t)
    _better(run, evaluated)
    found = diagnose(run.record())
    assert found.primary is None
    assert [f.severity for f in found.findings if f.cause is Cause.LENGTH_GROWTH] == (
        [] if evaluated else [Severity.INFO]
    )


def test_a_handful_of_prompts_learned_by_heart_is_no_inverted_reward():
    run = healthy(0)
    _flip(run)
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
