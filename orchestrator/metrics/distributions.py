"""The histograms of one driver's life, in bounded memory: counts by bucket of declared signals. Knows the catalogue,
and no source of values."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import product

from orchestrator.metrics.catalogue import DECLARED
from orchestrator.metrics.state import LabelValues
from orchestrator.metrics.types import Metric, MetricType
from trainer.types.histograms import BucketCounts


class Distributions:
    """Counts by bucket. Observing is a search in a short list; values that were counted elsewhere are added as they
    are."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[LabelValues, list[int]]] = {
            m.name: {} for m in DECLARED.values() if m.type is MetricType.HISTOGRAM
        }
        self._totals: dict[tuple[str, LabelValues], float] = {}
        for name in self._counts:
            self.begin(name, combinations(DECLARED[name], {}))

    def begin(self, name: str, series: Iterable[LabelValues]) -> None:
        """These series of `name` are there from the beginning, empty."""
        for labels in series:
            self._series(name, labels)

    def observe(self, name: str, value: float, *labels: str, times: int = 1) -> None:
        """Count a value `times` times."""
        self._series(name, labels)[bisect_left(DECLARED[name].buckets, value)] += times
        self._totals[name, labels] += value * times

    def observe_all(self, name: str, values: Iterable[float], *labels: str) -> None:
        """Count each value once."""
        for value in values:
            self.observe(name, value, *labels)

    def add(self, name: str, reduced: BucketCounts, *labels: str) -> None:
        """Add values that were counted elsewhere, by the same buckets.

        Raises:
            ValueError: by other buckets.
        """
        counts = self._series(name, labels)
        for index, count in zip(range(len(counts)), reduced.counts, strict=True):
            counts[index] += count
        self._totals[name, labels] += reduced.total

    def copy(self) -> dict[str, dict[LabelValues, BucketCounts]]:
        """All series as they stand."""
        return {
            name: {labels: BucketCounts(tuple(counts), self._totals[name, labels]) for labels, counts in series.items()}
            for name, series in self._counts.items()
        }

    def _series(self, name: str, labels: LabelValues) -> list[int]:
        series = self._counts[name]
        if labels not in series:
            series[labels] = [0] * (len(DECLARED[name].buckets) + 1)
            self._totals[name, labels] = 0.0
        return series[labels]


def combinations(metric: Metric, known: Mapping[str, Iterable[str]]) -> list[LabelValues]:
    """Every series that `metric` may have where its labels' values are declared or `known` by label name; none where
    one is neither."""
    return list(product(*(label.values or tuple(known.get(label.name, ())) for label in metric.labels)))
