"""What an exporter says to one scrape, read as Prometheus reads it."""

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

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


def declared_name(sample: str, declared: Mapping[str, object]) -> str:
    """The metric that a sample belongs to: histograms have three kinds of samples."""
    stems = (sample, *(sample.removesuffix(suffix) for suffix in ("_bucket", "_sum", "_count")))
    return next(stem for stem in stems if stem in declared)
