"""The doctor's rules on made-up runs: the right cause first, quiet where nothing is wrong, and advice that fits the
layer."""

import math

import numpy as np
import pytest
from support.loop.doctor_runs import MadeUpRun, healthy, rescore
from support.loop.doctor_scenarios import SCENARIOS, gap_by, gradient_spikes, length_pays, policy_collapses

from orchestrator.doctor.advice import ADVICE, DO_NOT, LAYER_3_TOOLS
from orchestrator.doctor.diagnosis import RULES, diagnose
from orchestrator.doctor.findings import Severity
from orchestrator.metrics.causes import LAYER, Cause

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
    assert set(SCENARIOS) | {Cause.SOLVED, Cause.LENGTH_GROWTH, Cause.TRAINER_WAITS} == set(Cause)
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
    policy_collapses(run)
    gap_by("precision")(run)
    found = diagnose(run.record())
    assert [finding.cause for finding in found.findings if finding.severity is not Severity.INFO] == [
        Cause.PRECISION,
        Cause.POLICY_COLLAPSE,
    ]
    assert {"approx_kl", "policy_entropy", "correction_ess"} <= set(found.untrusted)


def test_an_upstream_finding_outranks_a_downstream_one_unless_that_is_worse_and_began_earlier():
    run = healthy(0)
    gap_by("weight_sync")(run)
    gradient_spikes(run)
    length_pays(run)
    found = [finding for finding in diagnose(run.record()).findings if finding.severity is not Severity.INFO]
    assert [finding.cause for finding in found] == [Cause.LENGTH_REWARD, Cause.WEIGHT_SYNC, Cause.GRADIENT_SPIKE]
