"""A snapshot in which every declared signal has a value, as a large step would have."""

from itertools import product

from orchestrator.config import parse_config
from orchestrator.metrics.catalogue import CATALOGUE, sizes_of
from orchestrator.metrics.distributions import Distributions
from orchestrator.metrics.snapshot import Snapshot
from orchestrator.metrics.state import LabelValues
from orchestrator.metrics.types import Metric, MetricType

TWO_REPLICAS: dict[str, object] = {
    "engine": {"type": "scripted", "replicas": 2},
    "trainer": {"type": "scripted"},
    "consistency": {"mode": "off"},
}
SIZES = sizes_of(parse_config(TWO_REPLICAS, "test"), blocks=2, heads=2)


def series_of(metric: Metric) -> list[LabelValues]:
    """All label values of a run of two replicas, two blocks and two heads."""
    return list(product(*(label.values or tuple(map(str, range(label.size(SIZES)))) for label in metric.labels)))


def snapshot_of_everything(step: int, counted: Distributions) -> Snapshot:
    """Each number is `step`; each histogram counts one more value, in the bucket of that number."""
    for metric in CATALOGUE:
        if metric.type is MetricType.HISTOGRAM:
            for labels in series_of(metric):
                counted.observe(metric.name, metric.buckets[step], *labels)
    numbers = {
        m.name: dict.fromkeys(series_of(m), float(step)) for m in CATALOGUE if m.type is not MetricType.HISTOGRAM
    }
    return Snapshot(numbers=numbers, distributions=counted.copy())
