"""Every cause of a gap against a rescorer that is a table: what each question leaves of it. The sums, the order, the
stops and the 80 % rule."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.consistency.attribution_room import (
    AS_LOGGED,
    LIMITS,
    ROUTED,
    TableRescorer,
    V,
    ask,
    baseline,
    failed,
    parts,
    trajectory,
)

from rollout.types.trajectory import RoutingTrace
from trainer.consistency.attribution.attribution import attribute
from trainer.consistency.attribution.inquiry import AttributionFacts
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.types.evidence import Check, CheckSeverity, GapCause


def test_a_gap_below_the_floor_asks_nothing():
    rescorer = TableRescorer({AS_LOGGED: 0.01, ScoreOptions(dtype="float32"): 0.0})
    assert attribute([trajectory()], AttributionFacts(), rescorer, LIMITS) is None
    assert rescorer.asked == [AS_LOGGED]


def test_three_times_the_baseline_is_worth_asking_below_the_ceiling():
    rescorer = TableRescorer({AS_LOGGED: 0.01, ScoreOptions(dtype="float32"): 0.0})
    assert attribute([trajectory()], AttributionFacts(baseline=baseline(0.0034)), rescorer, LIMITS) is None
    assert parts(ask(rescorer, facts=AttributionFacts(baseline=baseline(0.003)))) == {GapCause.PRECISION: 0.01}


def test_scores_that_are_there_already_are_not_asked_for_again():
    rescorer = TableRescorer({AS_LOGGED: 0.2})
    one = trajectory((V[2], 8))
    behaviour = rescorer.score([one], AS_LOGGED)
    rescorer.asked.clear()
    assert attribute([one], AttributionFacts(), rescorer, LIMITS, behaviour=behaviour) is not None
    assert AS_LOGGED not in rescorer.asked


def test_questions_start_from_how_the_trainer_computes():
    base = ScoreOptions(replay_routing=True)
    rescorer = TableRescorer({AS_LOGGED: 0.2, base: 0.2, ScoreOptions(replay_routing=True, temperature=1.0): 0.0})
    found = ask(rescorer, trajectory(temperature=0.8, routing=(2, 2)), facts=AttributionFacts(options=base))
    assert parts(found) == {GapCause.LOGPROB_SEMANTICS: 0.2}
    assert all(options.replay_routing for options in rescorer.asked)


@pytest.mark.parametrize("check", [Check.STRUCTURE, Check.TOKENIZER])
def test_a_structural_failure_explains_everything_and_ends_the_inquiry(check: Check):
    rescorer = TableRescorer({AS_LOGGED: 0.2})
    found = ask(
        rescorer,
        trajectory(temperature=0.7),
        facts=AttributionFacts(structure=(failed(check),), canary_gap=0.1, canary_tolerance=0.01),
    )
    assert parts(found) == {GapCause.TOKENIZER: 0.2} and found.residual == 0.0 and found.first is GapCause.TOKENIZER
    assert rescorer.asked == [AS_LOGGED]


def test_a_structural_warning_explains_nothing():
    found = ask(
        TableRescorer({AS_LOGGED: 0.2}),
        facts=AttributionFacts(structure=(failed(Check.STRUCTURE, CheckSeverity.WARN),)),
    )
    assert found.parts == () and found.residual == found.gap and found.first is GapCause.UNKNOWN


RAW = ScoreOptions(temperature=1.0)
UNCUT = ScoreOptions(truncate=False)
RAW_UNCUT = ScoreOptions(temperature=1.0, truncate=False)


@pytest.mark.parametrize(
    ("tag", "truth", "asked"),
    [
        ({"temperature": 0.7}, RAW, [RAW]),
        ({"top_p": 0.9}, UNCUT, [UNCUT]),
        ({"top_k": 20}, UNCUT, [UNCUT]),
        ({"temperature": 0.7, "top_p": 0.9}, RAW_UNCUT, [UNCUT, RAW_UNCUT]),
    ],
)
def test_a_log_of_another_distribution_is_found_by_the_questions_that_its_tag_allows(
    tag: dict[str, Any], truth: ScoreOptions, asked: list[ScoreOptions]
):
    rescorer = TableRescorer({AS_LOGGED: 0.2, truth: 0.001})
    found = ask(rescorer, trajectory(**tag), facts=AttributionFacts(canary_gap=0.1, canary_tolerance=0.01))
    assert parts(found) == {GapCause.LOGPROB_SEMANTICS: 0.199} and found.first is GapCause.LOGPROB_SEMANTICS
    assert rescorer.asked == [AS_LOGGED, *asked]


def test_of_two_distributions_the_one_that_closes_more_is_taken():
    rescorer = TableRescorer({AS_LOGGED: 0.2, UNCUT: 0.03, RAW_UNCUT: 0.001})
    assert parts(ask(rescorer, trajectory(temperature=0.7, top_p=0.9))) == {GapCause.LOGPROB_SEMANTICS: 0.199}


@pytest.mark.parametrize(("left", "explained"), [(0.039, True), (0.041, False)])
def test_semantics_and_version_tag_must_close_eighty_percent(left: float, explained: bool):
    semantics = ask(TableRescorer({AS_LOGGED: 0.2, RAW: left}), trajectory(temperature=0.7))
    version = ask(TableRescorer({AS_LOGGED: 0.2, ScoreOptions(version_offset=-1): left}))
    for found, cause in ((semantics, GapCause.LOGPROB_SEMANTICS), (version, GapCause.VERSION_TAG)):
        assert parts(found) == ({cause: 0.2 - left} if explained else {})
        assert found.explained == pytest.approx(1.0 - left / 0.2 if explained else 0.0, abs=1e-5)


def test_replayed_experts_explain_routing_where_there_is_a_trace():
    rescorer = TableRescorer({AS_LOGGED: 0.2, ROUTED: 0.01})
    assert ask(rescorer, trajectory(routing=(2, 2))).first is GapCause.ROUTING
    dense = TableRescorer({AS_LOGGED: 0.2, ROUTED: 0.01})
    uncovered = RoutingTrace(experts=np.zeros((11, 2, 2), dtype=np.uint8), covered=np.zeros(11, dtype=np.bool_))
    assert ask(dense, trajectory(), replace(trajectory(), routing=uncovered)).parts == ()
    assert not any(options.replay_routing for options in dense.asked)


def test_a_fine_mean_with_many_far_tokens_is_a_tail():
    long = trajectory((V[3], 400))
    gap = [0.0] * 395 + [1.0] * 5
    found = ask(TableRescorer({AS_LOGGED: gap}), long)
    assert parts(found) == {GapCause.LOW_PROBABILITY_TAIL: 0.0125}
    assert (
        attribute([long], AttributionFacts(baseline=baseline(0.01, f2=0.01)), TableRescorer({AS_LOGGED: gap}), LIMITS)
        is None
    )


def test_a_mean_that_is_not_fine_is_no_tail():
    assert ask(TableRescorer({AS_LOGGED: [0.0] * 4 + [1.0] * 4})).parts == ()


def test_causes_share_a_gap_and_each_works_on_what_is_left_under_the_options_before_it():
    both = replace(ROUTED, dtype="bfloat16")
    all_three = replace(both, keep_kv=True)
    crossing = trajectory((V[3], 4), (V[4], 4), routing=(2, 2), weights_dtype="bfloat16")
    rescorer = TableRescorer({AS_LOGGED: 0.2, ROUTED: 0.12, both: [0.01] * 4 + [0.11] * 4, all_three: 0.01})
    found = ask(rescorer, crossing)
    assert parts(found) == {GapCause.ROUTING: 0.08, GapCause.PRECISION: 0.06, GapCause.STALE_KV: 0.05}
    assert [cause for cause, _ in found.parts] == [GapCause.ROUTING, GapCause.PRECISION, GapCause.STALE_KV]
    assert found.residual == pytest.approx(0.01, abs=1e-6) and found.first is GapCause.ROUTING


def test_an_option_that_closes_next_to_nothing_is_not_kept():
    found = ask(
        TableRescorer({AS_LOGGED: 0.2, ROUTED: 0.185, ScoreOptions(dtype="float32"): 0.02}), trajectory(routing=(2, 2))
    )
    assert parts(found) == {GapCause.PRECISION: 0.18}


def test_questions_come_in_the_order_of_the_causes_and_their_number_is_bounded():
    crossing = trajectory((V[3], 4), (V[4], 4), routing=(2, 2), weights_dtype="bfloat16", temperature=0.7, top_p=0.9)
    rescorer = TableRescorer({AS_LOGGED: [0.01] * 4 + [0.3] * 4})
    found = ask(rescorer, crossing)
    offsets = [ScoreOptions(version_offset=offset) for offset in (-1, 1, -2, 2)]
    fp8 = ScoreOptions(dtype="bfloat16", weights_dtype="float8_e4m3")
    declared = [ScoreOptions(dtype="bfloat16"), ScoreOptions(dtype="bfloat16", round_logits=True)]
    undeclared = [ScoreOptions(dtype="float16"), ScoreOptions(dtype="float16", round_logits=True)]
    formats = [*declared, ScoreOptions(dtype="float32"), fp8, *undeclared]
    estimates = [ScoreOptions(temperature=0.7 / 0.8), UNCUT]
    one_version = [AS_LOGGED, AS_LOGGED]
    assert rescorer.asked == [
        *(AS_LOGGED, UNCUT, RAW_UNCUT),
        *(*estimates, *offsets, *one_version, ROUTED),
        *(*formats, ScoreOptions(keep_kv=True)),
    ]
    assert found.parts == () and found.first is GapCause.UNKNOWN


def test_an_answer_that_makes_matters_worse_explains_nothing():
    worse = {AS_LOGGED: 0.2, ROUTED: 0.3, ScoreOptions(dtype="float32"): 0.4, ScoreOptions(version_offset=1): 0.5}
    found = ask(TableRescorer(worse), trajectory(routing=(2, 2)))
    assert found.parts == () and found.residual == found.gap


def test_whole_trajectories_are_looked_at_while_they_fit_and_always_the_first():
    three = [trajectory(index=index) for index in range(3)]
    for max_tokens, expected in ((36, 36), (35, 24), (24, 24), (1, 12)):
        rescorer = TableRescorer({AS_LOGGED: 0.2})
        assert attribute(three, AttributionFacts(), rescorer, LIMITS, max_tokens=max_tokens) is not None
        assert set(rescorer.tokens) == {expected}


def test_tokens_without_a_score_are_not_part_of_the_gap():
    half = [0.2] * 4 + [float("nan")] * 4
    found = ask(TableRescorer({AS_LOGGED: half, ScoreOptions(dtype="float32"): 0.0}))
    assert found.gap == pytest.approx(0.2, abs=1e-6) and parts(found) == {GapCause.PRECISION: 0.2}
    assert attribute([trajectory()], AttributionFacts(), TableRescorer({AS_LOGGED: float("nan")}), LIMITS) is None


def test_a_token_that_the_recomputed_distribution_excludes_leaves_a_finite_gap():
    found = ask(TableRescorer({AS_LOGGED: [0.0] * 7 + [-np.inf], UNCUT: 0.0}), trajectory(top_p=0.9))
    assert parts(found) == {GapCause.LOGPROB_SEMANTICS: 3.75}


def test_trajectories_of_two_replicas_are_two_inquiries():
    with pytest.raises(ValueError, match="one replica"):
        attribute([trajectory(), trajectory(replica=1)], AttributionFacts(), TableRescorer({AS_LOGGED: 0.2}), LIMITS)
    with pytest.raises(ValueError, match="expected some"):
        attribute([], AttributionFacts(), TableRescorer({AS_LOGGED: 0.2}), LIMITS)


def test_other_semantics_of_some_spans_do_not_drown_in_those_that_are_as_declared():
    """The log turns raw at the second span; the raw answer would open as much of a gap as it closes."""
    crossing = trajectory((V[3], 4), (V[4], 4), temperature=0.8)
    table: dict[ScoreOptions, float | Sequence[float]] = {
        AS_LOGGED: [0.0] * 4 + [0.4] * 4,
        ScoreOptions(temperature=1.0): [0.4] * 4 + [0.0] * 4,
    }
    assert parts(ask(TableRescorer(table), crossing)) == {GapCause.LOGPROB_SEMANTICS: 0.2}
