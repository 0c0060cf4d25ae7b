"""The values of all signals at one moment: immutable, so that a scrape may read them in its own thread while the loop
goes on."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.metrics.catalogue import DECLARED
from orchestrator.metrics.state import LabelValues
from orchestrator.metrics.types import Metric, MetricType
from rollout.errors import ConcordError
from trainer.types.histograms import BucketCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Values by metric name and label values; what was not measured is not there."""

    numbers: Mapping[str, Mapping[LabelValues, float]]
    """Gauges and counters."""
    distributions: Mapping[str, Mapping[LabelValues, BucketCounts]]
    """Histograms."""

    def __post_init__(self) -> None:
        """Hold every name and label to the catalogue.

        Raises:
            ConcordError: one is not declared, or not so.
        """
        for name, series in self.numbers.items():
            _check(name, series, histogram=False)
        for name, series in self.distributions.items():
            _check(name, series, histogram=True)


EMPTY = Snapshot(numbers={}, distributions={})
"""Before anything was measured."""


def _check(name: str, series: Iterable[LabelValues], *, histogram: bool) -> None:
    metric = DECLARED.get(name)
    if metric is None or (metric.type is MetricType.HISTOGRAM) != histogram:
        raise ConcordError(
            f"got values of {name}, which is not declared{'' if metric is None else ' as such'}; declare metrics in "
            "orchestrator/metrics"
        )
    for labels in series:
        if len(labels) != len(metric.labels) or not _fit(metric, labels):
            raise ConcordError(
                f"got {name} with label values {labels}; declared are "
                f"{[(label.name, label.values or label.extent) for label in metric.labels]}"
            )


def _fit(metric: Metric, labels: LabelValues) -> bool:
    return all(not label.values or value in label.values for label, value in zip(metric.labels, labels, strict=True))
