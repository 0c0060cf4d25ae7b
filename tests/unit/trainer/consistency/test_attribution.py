"""Every cause of a gap against a rescorer that is a table: what each question leaves of it. The sums, the order, the
stops and the 80 % rule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.builders import BASE
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

from rollout.published.number_formats import rounded_to_bf16
from rollout.types.trajectory import RoutingTrace, Trajectory, VersionSpan
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
    one = trajectory()
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
        rescorer, trajectory(temperature=0.7), facts=AttributionFacts(structure=(failed(check),), digest_differs=True)
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
    found = ask(rescorer, trajectory(**tag), facts=AttributionFacts(digest_differs=True))
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


@pytest.mark.parametrize(
    "facts",
    [
        AttributionFacts(digest_differs=True, baseline=baseline(0.002)),
        AttributionFacts(canary_gap=0.1, canary_tolerance=0.01, baseline=baseline(0.002)),
        AttributionFacts(canary_gap=float("nan"), canary_tolerance=0.01, baseline=baseline(0.002)),
        AttributionFacts(canary_gap=float("inf"), canary_tolerance=0.01, baseline=baseline(0.002)),
    ],
)
def test_other_weights_explain_all_but_the_baseline_and_end_the_inquiry(facts: AttributionFacts):
    stale = ScoreOptions(version_offset=-1)
    rescorer = TableRescorer({AS_LOGGED: 0.2, stale: 0.0})
    found = ask(rescorer, trajectory(routing=(2, 2)), facts=facts)
    assert parts(found) == {GapCause.WEIGHT_SYNC: 0.198} and found.residual == pytest.approx(0.002)
    assert rescorer.asked == [AS_LOGGED]


def test_a_stale_replica_is_weight_sync_though_one_offset_fits_all_its_trajectories():
    replica = [trajectory((V[3], 8), index=0), trajectory((V[4], 8), index=1)]
    table = {AS_LOGGED: 0.2, ScoreOptions(version_offset=-1): 0.0}
    assert (
        ask(TableRescorer(table), *replica, facts=AttributionFacts(canary_gap=0.2, canary_tolerance=0.01)).first
        is GapCause.WEIGHT_SYNC
    )
    assert (
        ask(TableRescorer(table), *replica, facts=AttributionFacts(canary_gap=0.005, canary_tolerance=0.01)).first
        is GapCause.VERSION_TAG
    )


@pytest.mark.parametrize("place", range(4))
def test_offsets_are_tried_near_to_far_and_the_first_that_closes_ends_the_inquiry(place: int):
    offsets = [ScoreOptions(version_offset=offset) for offset in (-1, 1, -2, 2)]
    rescorer = TableRescorer({AS_LOGGED: 0.2, offsets[place]: 0.0})
    assert parts(ask(rescorer, trajectory(routing=(2, 2)))) == {GapCause.VERSION_TAG: 0.2}
    assert rescorer.asked == [AS_LOGGED, *offsets[: place + 1]]


def test_versions_before_the_base_model_are_not_asked_for():
    rescorer = TableRescorer({AS_LOGGED: 0.2})
    ask(rescorer, trajectory((BASE, 8)))
    assert [options.version_offset for options in rescorer.asked if options.version_offset] == [1, 2]


def test_tokens_whose_neighbour_version_is_not_held_stay_unexplained():
    unknown = [0.0, 0.0, 0.0, 0.0, float("nan"), float("nan"), float("nan"), float("nan")]
    found = ask(TableRescorer({AS_LOGGED: 0.2, ScoreOptions(version_offset=-1): unknown}))
    assert found.parts == ()
    one_unknown = [0.0] * 7 + [float("nan")]
    assert parts(ask(TableRescorer({AS_LOGGED: 0.2, ScoreOptions(version_offset=-1): one_unknown}))) == {
        GapCause.VERSION_TAG: 0.175
    }


def test_replayed_experts_explain_routing_where_there_is_a_trace():
    rescorer = TableRescorer({AS_LOGGED: 0.2, ROUTED: 0.01})
    assert ask(rescorer, trajectory(routing=(2, 2))).first is GapCause.ROUTING
    dense = TableRescorer({AS_LOGGED: 0.2, ROUTED: 0.01})
    uncovered = RoutingTrace(experts=np.zeros((11, 2, 2), dtype=np.uint8), covered=np.zeros(11, dtype=np.bool_))
    assert ask(dense, trajectory(), replace(trajectory(), routing=uncovered)).parts == ()
    assert not any(options.replay_routing for options in dense.asked)


@pytest.mark.parametrize(
    ("tag", "truth"),
    [
        ({"weights_dtype": "bfloat16"}, ScoreOptions(dtype="bfloat16")),
        ({"weights_dtype": "float16"}, ScoreOptions(dtype="float16")),
        ({"weights_dtype": "bfloat16"}, ScoreOptions(dtype="float32")),
        (
            {"weights_dtype": "bfloat16", "quantization": "fp8"},
            ScoreOptions(dtype="bfloat16", weights_dtype="float8_e4m3"),
        ),
        ({"weights_dtype": "int4"}, ScoreOptions(weights_dtype="float8_e4m3")),
    ],
)
def test_other_number_formats_explain_precision(tag: dict[str, Any], truth: ScoreOptions):
    assert parts(ask(TableRescorer({AS_LOGGED: 0.2, truth: 0.01}), trajectory(**tag))) == {GapCause.PRECISION: 0.19}


def test_of_several_number_formats_the_one_that_closes_most_is_the_explanation():
    fp8 = ScoreOptions(dtype="bfloat16", weights_dtype="float8_e4m3")
    rescorer = TableRescorer(
        {AS_LOGGED: 0.2, ScoreOptions(dtype="bfloat16"): 0.15, ScoreOptions(dtype="float32"): 0.25, fp8: 0.1}
    )
    assert parts(ask(rescorer, trajectory(weights_dtype="bfloat16"))) == {GapCause.PRECISION: 0.1}


def rounded_log(scores: NDArray[np.float32]) -> Trajectory:
    """Its log holds these scores, rounded to bfloat16 on the way."""
    built = trajectory()
    logprobs = built.rollout_logprobs.copy()
    logprobs[built.sampled] = rounded_to_bf16(scores)
    return replace(built, rollout_logprobs=logprobs)


SCORES = np.array([-1.32, -1.51, -0.01, -9.87, -20.3, -3.333, -0.777, -2.222], dtype=np.float32)


def test_logprobs_rounded_in_transport_are_precision_and_cost_no_question():
    sent = rounded_log(SCORES)
    gap = SCORES.astype(np.float64) - rounded_to_bf16(SCORES)
    rescorer = TableRescorer({AS_LOGGED: gap.tolist()})
    found = ask(rescorer, sent, limits=LIMITS.model_copy(update={"mean_abs_warn": 1e-3}))
    assert parts(found) == {GapCause.PRECISION: float(np.abs(gap).mean())} and found.residual == pytest.approx(
        0.0, abs=1e-9
    )
    assert not any(options.dtype != "trainer" or options.weights_dtype != "as_published" for options in rescorer.asked)


def test_logprobs_near_the_bfloat16_grid_but_not_on_it_are_not_rounded_ones():
    sent = rounded_log(SCORES)
    gap = SCORES.astype(np.float64) - rounded_to_bf16(SCORES)
    gap[4] += 0.2
    assert ask(TableRescorer({AS_LOGGED: gap.tolist()}), sent).parts == ()


def test_rounding_in_transport_shows_after_the_arithmetic_is_explained():
    sent = rounded_log(SCORES)
    gap = SCORES.astype(np.float64) - rounded_to_bf16(SCORES)
    rescorer = TableRescorer({AS_LOGGED: 0.2, ScoreOptions(dtype="bfloat16"): gap.tolist()})
    found = ask(rescorer, replace(sent, tag=replace(sent.tag, weights_dtype="bfloat16")))
    assert parts(found) == {GapCause.PRECISION: 0.2} and found.residual == pytest.approx(0.0, abs=1e-6)


KEPT = ScoreOptions(keep_kv=True)


def test_a_gap_that_starts_at_a_version_boundary_is_stale_kv():
    crossing = trajectory((V[3], 4), (V[4], 4))
    rescorer = TableRescorer({AS_LOGGED: [0.001] * 4 + [0.1] * 4, KEPT: 0.001})
    assert parts(ask(rescorer, crossing)) == {GapCause.STALE_KV: 0.0495}


def test_a_gap_on_both_sides_of_the_boundary_is_not_stale_kv():
    rescorer = TableRescorer({AS_LOGGED: 0.1, KEPT: 0.0})
    assert ask(rescorer, trajectory((V[3], 4), (V[4], 4))).parts == ()
    assert KEPT not in rescorer.asked


class KeptSince(TableRescorer):
    """Kept keys and values close the gap only where all that was sampled before them is of one version."""

    def score(self, trajectories: Sequence[Trajectory], options: ScoreOptions) -> list[NDArray[np.float32]]:
        if options.keep_kv and any(
            [(s.policy, s.start) for s in t.version_spans] != [(V[2], 4), (V[3], 10)] for t in trajectories
        ):
            options = replace(options, version_offset=3)  # outside the table
        return super().score(trajectories, options)


def test_kept_keys_and_values_are_looked_for_from_the_boundary_at_which_the_gap_starts():
    """Versions 1 and 2 were recomputed at their boundary; only the one to version 3 kept what version 2 wrote."""
    crossing = trajectory((V[1], 3), (V[2], 3), (V[3], 2))
    rescorer = KeptSince({AS_LOGGED: [0.0] * 6 + [0.4] * 2, KEPT: [0.7] * 6 + [0.0] * 2})
    assert parts(ask(rescorer, crossing)) == {GapCause.STALE_KV: 0.1}


def two_generations() -> Trajectory:
    """Versions 3 and 4, with given tokens between them."""
    built = trajectory((V[3], 4), (V[3], 4))
    sampled, logprobs = built.sampled.copy(), built.rollout_logprobs.copy()
    sampled[7], logprobs[7] = False, 0.0
    return replace(
        built,
        sampled=sampled,
        rollout_logprobs=logprobs,
        version_spans=(VersionSpan(V[3], 4, 7), VersionSpan(V[4], 8, 12)),
    )


def test_only_a_boundary_inside_one_generation_asks_for_kept_kv():
    once = [0.0] * 4 + [0.1] * 4
    for one, gap in ((trajectory(), once), (two_generations(), once[1:]), (trajectory((V[3], 4), (V[3], 4)), once)):
        rescorer = TableRescorer({AS_LOGGED: gap})
        ask(rescorer, one)
        assert KEPT not in rescorer.asked


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


def test_questions_come_in_the_order_of_the_causes_and_at_most_eleven():
    crossing = trajectory((V[3], 4), (V[4], 4), routing=(2, 2), weights_dtype="bfloat16", temperature=0.7, top_p=0.9)
    rescorer = TableRescorer({AS_LOGGED: [0.01] * 4 + [0.3] * 4})
    found = ask(rescorer, crossing)
    offsets = [ScoreOptions(version_offset=offset) for offset in (-1, 1, -2, 2)]
    fp8 = ScoreOptions(dtype="bfloat16", weights_dtype="float8_e4m3")
    formats = [ScoreOptions(dtype="bfloat16"), ScoreOptions(dtype="float32"), fp8]
    assert rescorer.asked == [AS_LOGGED, UNCUT, RAW_UNCUT, *offsets, ROUTED, *formats, KEPT]
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


@pytest.mark.parametrize("top_p", [0.95, 0.9, 0.8, 0.99])
def test_an_engine_that_truncates_without_saying_so_logs_another_distribution(top_p: float):
    found = ask(
        TableRescorer({AS_LOGGED: -0.1, ScoreOptions(top_p=top_p): -0.01, ScoreOptions(dtype="bfloat16"): -0.02})
    )
    assert parts(found) == {GapCause.LOGPROB_SEMANTICS: 0.09}


@pytest.mark.parametrize(("gap", "tag"), [(-0.1, {"top_p": 0.9}), (0.1, {})])
def test_neither_a_declared_truncation_nor_tokens_logged_as_less_likely_ask_about_an_undeclared_one(
    gap: float, tag: dict[str, Any]
):
    rescorer = TableRescorer({AS_LOGGED: gap})
    ask(rescorer, trajectory(**tag))
    assert not any(options.top_p for options in rescorer.asked)


def gaps_by_version(gaps: Mapping[int, float]) -> list[float]:
    """One a token of `trajectory((V[2], 4), (V[3], 4), (V[4], 4))`."""
    return [gap for version in (2, 3, 4) for gap in [gaps[version]] * 4]


def test_a_replica_that_stays_at_one_version_is_off_by_more_at_each_new_label():
    """Weights of version 2 under the labels 2, 3 and 4."""
    table: dict[ScoreOptions, float | Sequence[float]] = {
        AS_LOGGED: gaps_by_version({2: 0.0, 3: 0.3, 4: 0.6}),
        ScoreOptions(version_offset=-1): gaps_by_version({2: 0.3, 3: 0.0, 4: 0.3}),
        ScoreOptions(version_offset=-2): gaps_by_version({2: 0.6, 3: 0.3, 4: 0.0}),
    }
    found = ask(TableRescorer(table), trajectory((V[2], 4), (V[3], 4), (V[4], 4)))
    assert parts(found) == {GapCause.VERSION_TAG: 0.3} and found.explained > 0.999


def test_other_semantics_of_some_spans_do_not_drown_in_those_that_are_as_declared():
    """The log turns raw at the second span; the raw answer would open as much of a gap as it closes."""
    crossing = trajectory((V[3], 4), (V[4], 4), temperature=0.8)
    table: dict[ScoreOptions, float | Sequence[float]] = {
        AS_LOGGED: [0.0] * 4 + [0.4] * 4,
        ScoreOptions(temperature=1.0): [0.4] * 4 + [0.0] * 4,
    }
    assert parts(ask(TableRescorer(table), crossing)) == {GapCause.LOGPROB_SEMANTICS: 0.2}


def test_a_label_that_goes_wrong_within_a_span_is_a_version_tag():
    """Six tokens of version 3 were labelled 2, like the two before them."""
    table: dict[ScoreOptions, float | Sequence[float]] = {
        AS_LOGGED: [0.0] * 2 + [0.4] * 6,
        ScoreOptions(version_offset=1): [0.4] * 2 + [0.0] * 6,
    }
    assert parts(ask(TableRescorer(table), trajectory((V[2], 8)))) == {GapCause.VERSION_TAG: 0.3}


def test_rounding_in_transport_that_begins_within_a_span_is_precision():
    sent = rounded_log(SCORES)
    gap = np.where(np.arange(8) < 3, 0.0, SCORES.astype(np.float64) - rounded_to_bf16(SCORES))
    sent.rollout_logprobs[sent.sampled] = np.where(np.arange(8) < 3, SCORES, sent.rollout_logprobs[sent.sampled])
    found = ask(
        TableRescorer({AS_LOGGED: gap.tolist()}), sent, limits=LIMITS.model_copy(update={"mean_abs_warn": 1e-4})
    )
    assert parts(found) == {GapCause.PRECISION: float(np.abs(gap).mean())} and found.residual == pytest.approx(
        0.0, abs=1e-9
    )
