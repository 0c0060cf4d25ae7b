"""Versions as the cause of a gap: other weights, wrong labels, and keys and values of older weights."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from support.builders import BASE
from support.consistency.attribution_room import AS_LOGGED, TableRescorer, V, ask, baseline, parts, trajectory

from rollout.types.trajectory import Trajectory, VersionSpan
from trainer.consistency.attribution.inquiry import AttributionFacts
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.types.evidence import GapCause


@pytest.mark.parametrize(
    "facts",
    [
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
    assert [options for options in rescorer.asked if options.version_offset] == offsets[: place + 1]


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


def test_a_label_that_goes_wrong_within_a_span_is_a_version_tag():
    """Six tokens of version 3 were labelled 2, like the two before them."""
    table: dict[ScoreOptions, float | Sequence[float]] = {
        AS_LOGGED: [0.0] * 2 + [0.4] * 6,
        ScoreOptions(version_offset=1): [0.4] * 2 + [0.0] * 6,
    }
    assert parts(ask(TableRescorer(table), trajectory((V[2], 8)))) == {GapCause.VERSION_TAG: 0.3}
