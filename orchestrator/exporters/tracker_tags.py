"""What trackers get of a step: the catalogue's signals under tags. It knows snapshots, and no tracker.

Every signal of a snapshot goes to trackers, unless `LEFT_OUT` says why not: what is declared anew arrives there without
a line of code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from orchestrator.metrics.catalogue import BY_COLUMN, DECLARED
from orchestrator.metrics.layers import LAYERS
from orchestrator.metrics.snapshot import Snapshot
from orchestrator.metrics.state import LabelValues
from orchestrator.metrics.types import MetricType, labels_text
from trainer.types.histograms import BucketCounts

LEFT_OUT: Mapping[str, str] = {
    "concord_eval_score": "`evaluation_score` has it, a curve for each configuration",
    "concord_step_duration_seconds": "one value a step: `step_seconds`",
    "concord_step_phase_seconds_total": (
        "`step_wait_seconds`, `step_train_seconds`, `step_publish_seconds` and `step_checkpoint_seconds` have it step "
        "by step"
    ),
    "concord_batch_wait_seconds": "0 whenever a step ends; how long it waited is `step_wait_seconds`",
    "concord_last_step_timestamp_seconds": "trackers give every point a time of their own",
    "concord_last_step_age_seconds": "0 whenever a step ends",
    "concord_start_timestamp_seconds": "trackers give every point a time of their own",
    "concord_run_info": "never changes: it is in the config",
    "concord_batch_groups": "never changes: it is in the config",
    "concord_max_staleness": "never changes: it is in the config",
    "concord_dispatched_groups_total": "`dispatched` has it for the whole run",
    "concord_trained_groups_total": "`trained` has it for the whole run",
    "concord_steps_total": "`step` and `skipped_steps` have it",
    "concord_restarts_total": "`replica_restarts`, `worker_restarts` and `auditor_restarts` have it",
    "concord_gradloc_searches_total": "`gradloc_runs_located` and the columns beside it have it",
    "concord_gradloc_search_passes_total": "`gradloc_passes` has it",
    "concord_gradloc_search_seconds_total": "`gradloc_seconds` has it",
}
"""Declared signals that trackers do not get, and why."""
STEPS = "steps"
"""The series of the steps themselves."""


@dataclass(frozen=True, slots=True)
class Bars:
    """The values of one step by bucket, between finite edges."""

    edges: tuple[float, ...]
    """Rising, one more than there are counts. What lies beyond the declared ones is in a bucket as wide as its
    neighbour."""
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """What was measured at one step, by tag."""

    step: int
    series: str
    """Whose steps rise: `STEPS`, or the tag of a score, which comes when it is known and belongs to the version that it
    scored."""
    numbers: Mapping[str, float]
    bars: Mapping[str, Bars]


class TrackedSignals:
    """Turns the snapshots of one loop's steps into points. Distributions become those of the step; counters stay what
    they are for Prometheus."""

    def __init__(self) -> None:
        self._counted: Mapping[str, Mapping[LabelValues, BucketCounts]] = {}
        self._begun: set[str] = set()

    def of_step(self, snapshot: Snapshot) -> list[Points]:
        """What was measured at a step that has just ended."""
        step = int(snapshot.numbers["concord_step"][()])
        numbers = {tag: value for tag, value, awaits in _numbers(snapshot) if not awaits or self._has_begun(tag, value)}
        before, self._counted = self._counted, snapshot.distributions
        bars = dict(_bars(before, snapshot.distributions))
        return [Points(step=step, series=STEPS, numbers=numbers, bars=bars)]

    def _has_begun(self, tag: str, value: float) -> bool:
        if value:
            self._begun.add(tag)
        return tag in self._begun

    def of_score(self, snapshot: Snapshot) -> list[Points]:
        """The score of the newest evaluation, at the version that it scored; scores of another configuration are
        another curve."""
        scores, version, error = (
            snapshot.numbers.get(f"concord_{name}", {}) for name in ("evaluation_score", "eval_version", "eval_stderr")
        )
        points: list[Points] = []
        for labels, score in scores.items():
            # The error has no label in the catalogue; as a curve it belongs to its score.
            errors = {_tag("concord_eval_stderr", ("configuration",), labels): value for value in error.values()}
            tag = tag_of("concord_evaluation_score", labels)
            points.append(Points(step=int(version[()]), series=tag, numbers={tag: score, **errors}, bars={}))
        return points


def meaning_of(tag: str) -> str:
    """What a curve shows, as the catalogue has it."""
    group, _, last = tag.partition("/")
    metric = BY_COLUMN[group.partition(": ")[2] or last]
    return f"{metric.help} Unit: {metric.unit}."


@cache
def tag_of(name: str, labels: LabelValues = ()) -> str:
    """The name of a declared series in a tracker. What stands before the slash is a group: the layer of diagnosis, or
    in it a signal with labels."""
    return _tag(name, DECLARED[name].label_names, labels)


def _tag(name: str, label_names: tuple[str, ...], labels: LabelValues) -> str:
    metric = DECLARED[name]
    group = f"{metric.diagnosis_layer} {LAYERS[metric.diagnosis_layer].name}"
    return f"{group}: {metric.column}/{labels_text(label_names, labels)}" if labels else f"{group}/{metric.column}"


BY_SCORE = frozenset(("concord_evaluation_score", "concord_eval_stderr"))
"""Signals about a version that was scored, not about a step."""


def _numbers(snapshot: Snapshot) -> Iterator[tuple[str, float, bool]]:
    """Tag, value, and whether the curve begins with its first value other than 0: what counts or says yes and no is a
    curve once it has happened."""
    for name, series in snapshot.numbers.items():
        if name not in LEFT_OUT and name not in BY_SCORE:
            metric = DECLARED[name]
            awaits = bool(metric.labels) and (metric.type is MetricType.COUNTER or metric.unit == "bool")
            for labels, value in series.items():
                yield tag_of(name, labels), value, awaits


def _bars(
    before: Mapping[str, Mapping[LabelValues, BucketCounts]], now: Mapping[str, Mapping[LabelValues, BucketCounts]]
) -> Iterator[tuple[str, Bars]]:
    """What was counted in between; nothing of a series in which nothing was."""
    for name, series in now.items():
        if name in LEFT_OUT:
            continue
        for labels, reduced in series.items():
            old = before.get(name, {}).get(labels)
            counts = reduced.counts
            if old is not None:
                counts = tuple(new - known for new, known in zip(counts, old.counts, strict=True))
            if any(counts):
                yield tag_of(name, labels), Bars(_closed(DECLARED[name].buckets), counts)


@cache
def _closed(ends: tuple[float, ...]) -> tuple[float, ...]:
    """The ends of buckets with one below and one above: 0, where all values are positive."""
    lowest = 0.0 if ends[0] > 0 else 2 * ends[0] - ends[1]
    return (lowest, *ends, 2 * ends[-1] - ends[-2])
