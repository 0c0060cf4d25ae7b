"""Serves the newest snapshot to Prometheus over HTTP, in threads of its own. It knows the catalogue and no loop; a scrape never makes the loop wait."""

import socket
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Self, TypeAlias

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from orchestrator.distributions import LabelValues
from orchestrator.metric_types import Metric, MetricType
from orchestrator.metrics import CATALOGUE
from orchestrator.snapshot import EMPTY, Snapshot
from rollout.errors import UserError
from rollout.scrape_server import ScrapeServer
from trainer.histograms import BucketCounts

Values: TypeAlias = Mapping[LabelValues, float] | Mapping[LabelValues, BucketCounts]
"""Of one metric, by label values."""


class Exporter:
    """Listens from its making until `close`. A context manager."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on `port` of `host`; 0 takes a free one.

        Raises:
            UserError: the port is taken, or the host is no address of this machine.
        """
        self._snapshot = EMPTY
        text = Text()
        try:
            self._server = ScrapeServer(host, port, lambda: text.of(self._snapshot))
        except OSError as cause:
            raise UserError(
                f"cannot serve metrics on {host}:{port}: {cause.strerror or cause}; set exporter.port to a free port, or to 0 for any, "
                "and exporter.host to an address of this machine"
            ) from cause

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def target(self) -> str:
        """host:port, for Prometheus."""
        return self._server.target(socket.gethostname)

    @property
    def url(self) -> str:
        """Where a person can look."""
        return f"http://{self.target}/metrics"

    @property
    def snapshot(self) -> Snapshot:
        """What a scrape gets now."""
        return self._snapshot

    def show(self, snapshot: Snapshot) -> None:
        """Scrapes get `snapshot` from now on."""
        self._snapshot = snapshot

    def close(self) -> None:
        """Stop listening."""
        self._server.close()


class Text:
    """Snapshots as Prometheus reads them; a metric whose values have not changed since the scrape before keeps its lines."""

    def __init__(self) -> None:
        self._lines: dict[str, tuple[Values, bytes]] = {}

    def of(self, snapshot: Snapshot) -> bytes:
        """Every metric that has a value, in the order of the catalogue."""
        return b"".join(self._lines_of(metric, snapshot) for metric in CATALOGUE)

    def _lines_of(self, metric: Metric, snapshot: Snapshot) -> bytes:
        values: Values = (snapshot.distributions if metric.type is MetricType.HISTOGRAM else snapshot.numbers).get(metric.name, {})
        before = self._lines.get(metric.name)
        if before is not None and before[0] == values:
            return before[1]
        lines = generate_latest(_One(_family(metric, snapshot))) if values else b""
        self._lines[metric.name] = values, lines
        return lines


class _One:
    """What prometheus_client writes out."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Family]:
        """The one family."""
        yield self._family


def described(metric: Metric) -> str:
    """Help, unit and layer, as Prometheus shows them."""
    return f"{metric.help} Unit: {metric.unit}. Layer of diagnosis: {metric.diagnosis_layer}."


def _family(metric: Metric, snapshot: Snapshot) -> Family:
    if metric.type is MetricType.HISTOGRAM:
        return _histogram(metric, snapshot.distributions[metric.name])
    kind = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
    family = kind(metric.name, described(metric), labels=metric.label_names)
    for labels, value in snapshot.numbers[metric.name].items():
        family.add_metric(labels, value)
    return family


def _histogram(metric: Metric, series: Mapping[LabelValues, BucketCounts]) -> Family:
    family = HistogramMetricFamily(metric.name, described(metric), labels=metric.label_names)
    ends = (*map(str, metric.buckets), "+Inf")
    for labels, reduced in series.items():
        family.add_metric(labels, list(zip(ends, map(float, accumulate(reduced.counts)), strict=True)), reduced.total)
    return family
