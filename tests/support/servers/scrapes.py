"""What an exporter says to one scrape, read as Prometheus reads it."""

import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from orchestrator.metrics.catalogue import DECLARED
from orchestrator.metrics.types import Metric

Series = tuple[str, frozenset[tuple[str, str]]]
"""Sample name with its labels."""


def scrape(url: str) -> dict[Series, float]:
    """All samples; a series that comes twice is an error."""
    with urllib.request.urlopen(url, timeout=10.0) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def value_of(samples: Mapping[Series, float], name: str, **labels: str) -> float:
    """Of one series."""
    return samples[name, frozenset(labels.items())]


def metric_of(sample: str) -> Metric | None:
    """The metric that a sample belongs to; histograms have three kinds of samples. None: it is not declared."""
    stems = (sample, *(sample.removesuffix(suffix) for suffix in ("_bucket", "_sum", "_count")))
    return next((DECLARED[stem] for stem in stems if stem in DECLARED), None)


def series_by_metric(samples: Iterable[str]) -> Counter[str]:
    """How many samples each declared metric has."""
    metrics = [(sample, metric_of(sample)) for sample in samples]
    assert not [sample for sample, metric in metrics if metric is None], "undeclared"
    return Counter(metric.name for _, metric in metrics if metric is not None)
