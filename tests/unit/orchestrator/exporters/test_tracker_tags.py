"""What trackers get of a step: every declared signal, under a tag that says layer, name and labels; distributions of
the step alone."""

import math
import re

import pytest
from support.loop.every_signal import series_of, snapshot_of_everything

from orchestrator.exporters.tracker_tags import LEFT_OUT, STEPS, Bars, TrackedSignals, meaning_of, tag_of
from orchestrator.metrics.catalogue import BY_COLUMN, CATALOGUE, COLUMNS, DECLARED
from orchestrator.metrics.distributions import Distributions
from orchestrator.metrics.snapshot import Snapshot
from orchestrator.metrics.types import MetricType

GATHERED = {"concord_eval_stderr"}
"""A column that gets the label of its score."""


def numbers_of(**series: dict[tuple[str, ...], float]) -> Snapshot:
    return Snapshot(
        numbers={"concord_step": {(): 1.0}, **{f"concord_{name}": values for name, values in series.items()}},
        distributions={},
    )


def test_every_declared_signal_reaches_trackers_or_is_left_out_with_its_reason():
    signals, snapshot = TrackedSignals(), snapshot_of_everything(1, Distributions())
    points = [*signals.of_step(snapshot), *signals.of_score(snapshot)]
    numbers, bars = {tag for each in points for tag in each.numbers}, {tag for each in points for tag in each.bars}
    for metric in CATALOGUE:
        tags = {tag_of(metric.name, labels) for labels in series_of(metric)}
        arrived = tags & (bars if metric.type is MetricType.HISTOGRAM else numbers)
        if metric.name in LEFT_OUT:
            assert not arrived, metric.name
        elif metric.name not in GATHERED:
            assert arrived == tags, metric.name
    assert "1 data and reward: eval_stderr/configuration=0" in numbers


def test_what_is_left_out_is_declared_and_has_a_reason_that_names_declared_signals():
    assert set(LEFT_OUT) <= set(DECLARED)
    for name, reason in LEFT_OUT.items():
        assert reason and {BY_COLUMN[other].name for other in re.findall(r"`(\w+)`", reason)} <= set(DECLARED) - set(
            LEFT_OUT
        ), name


def test_tags_are_grouped_by_layer_and_signals_with_labels_are_groups_of_their_own():
    assert tag_of("concord_reward_mean") == "1 data and reward/reward_mean"
    assert tag_of("concord_reward_part_mean", ("format",)) == "1 data and reward: reward_part_mean/part=format"
    assert (
        tag_of("concord_replica_gap_nats", ("0", "p99"))
        == "4 training system: replica_gap_nats/replica=0,statistic=p99"
    )
    assert {tag_of(BY_COLUMN[column].name).rpartition("/")[2] for column in COLUMNS} == set(COLUMNS)


def test_every_tag_leads_back_to_its_meaning():
    tags = {tag_of(metric.name, labels): metric for metric in CATALOGUE for labels in series_of(metric)}
    assert all(meaning_of(tag) == f"{metric.help} Unit: {metric.unit}." for tag, metric in tags.items())
    assert meaning_of(tag_of("concord_reward_part_mean", ("a/b: c",))) == meaning_of(
        tag_of("concord_reward_part_mean", ("d",))
    )


def test_a_histogram_shows_what_was_counted_in_its_step_alone():
    counted, signals, tag = Distributions(), TrackedSignals(), tag_of("concord_log_ratio_nats", ("total",))
    shown: list[Bars | None] = []
    for values in ((0.0, 0.0), (0.0, 7.0), ()):
        counted.observe_all("concord_log_ratio_nats", values, "total")
        (points,) = signals.of_step(Snapshot(numbers={"concord_step": {(): 1.0}}, distributions=counted.copy()))
        shown.append(points.bars.get(tag))
    first, second, nothing = shown
    assert first is not None and second is not None and nothing is None
    assert (sum(first.counts), sum(second.counts), second.counts[-1]) == (2, 2, 1)


def test_bars_have_finite_rising_edges_and_keep_those_that_are_declared():
    for metric in (metric for metric in CATALOGUE if metric.buckets):
        counted = Distributions()
        counted.observe(metric.name, metric.buckets[0], *series_of(metric)[0])
        (points,) = TrackedSignals().of_step(
            Snapshot(numbers={"concord_step": {(): 1.0}}, distributions=counted.copy())
        )
        for bars in points.bars.values():
            assert all(map(math.isfinite, bars.edges)) and list(bars.edges) == sorted(set(bars.edges))
            assert bars.edges[1:-1] == metric.buckets and len(bars.edges) == len(bars.counts) + 1


@pytest.mark.parametrize("name", ["rejected_groups_total", "diagnosis_primary"])
def test_what_counts_or_says_yes_and_no_is_a_curve_once_it_has_happened(name: str):
    metric, signals = DECLARED[f"concord_{name}"], TrackedSignals()
    one, other = series_of(metric)[:2]
    tags = [
        set(signals.of_step(numbers_of(**{name: {one: value, other: 0.0}}))[0].numbers) for value in (0.0, 1.0, 0.0)
    ]
    curve, silent = tag_of(metric.name, one), tag_of(metric.name, other)
    assert [curve in each for each in tags] == [False, True, True]
    assert not any(silent in each for each in tags)


def test_another_value_of_0_is_a_point():
    (points,) = TrackedSignals().of_step(
        numbers_of(reward_part_mean={("format",): 0.0}, diagnosis={("1",): 0.0}, loss={(): 0.0})
    )
    assert len(points.numbers) == 4 and points.series == STEPS


def test_a_score_is_a_point_at_its_version_and_another_configuration_is_another_curve():
    signals = TrackedSignals()
    of = [
        signals.of_score(
            numbers_of(evaluation_score={(configuration,): 0.5}, eval_version={(): version}, eval_stderr={(): 0.1})
        )
        for configuration, version in (("0", 4.0), ("1", 6.0))
    ]
    assert [[(points.step, dict(points.numbers)) for points in each] for each in of] == [
        [
            (
                4,
                {
                    "1 data and reward: evaluation_score/configuration=0": 0.5,
                    "1 data and reward: eval_stderr/configuration=0": 0.1,
                },
            )
        ],
        [
            (
                6,
                {
                    "1 data and reward: evaluation_score/configuration=1": 0.5,
                    "1 data and reward: eval_stderr/configuration=1": 0.1,
                },
            )
        ],
    ]
    assert of[0][0].series != of[1][0].series
    assert signals.of_score(numbers_of()) == []
