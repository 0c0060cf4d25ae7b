"""Serves the newest snapshot to Prometheus over HTTP, in threads of its own. It knows the catalogue and no loop; a scrape never makes the loop wait."""

import socket
import threading
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from orchestrator.distributions import LabelValues
from orchestrator.metric_types import Metric, MetricType
from orchestrator.metrics import CATALOGUE
from orchestrator.snapshot import EMPTY, Snapshot
from rollout.errors import UserError
from trainer.histograms import BucketCounts

_ANY_ADDRESS = ("0.0.0.0", "::", "")


class Exporter:
    """Listens from its making until `close`. A context manager."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on `port` of `host`; 0 takes a free one.

        Raises:
            UserError: the port is taken, or the host is no address of this machine.
        """
        self._snapshot = EMPTY
        registry = CollectorRegistry()
        registry.register(_Collector(self))
        try:
            server, thread = start_http_server(port, addr=host, registry=registry)
        except OSError as cause:
            raise UserError(
                f"cannot serve metrics on {host}:{port}: {cause.strerror or cause}; set exporter.port to a free port, or to 0 for any, "
                "and exporter.host to an address of this machine"
            ) from cause
        self._server: WSGIServer = server
        self._thread: threading.Thread = thread
        self._host = host

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def target(self) -> str:
        """host:port, for Prometheus."""
        return f"{socket.gethostname() if self._host in _ANY_ADDRESS else self._host}:{self._server.server_port}"

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
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    """What prometheus_client asks at a scrape."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter

    def describe(self) -> list[Family]:
        """Nothing: a private registry holds one collector, so no name can be taken twice."""
        return []

    def collect(self) -> Iterator[Family]:
        """The families of one snapshot."""
        return families(self._exporter.snapshot)


def families(snapshot: Snapshot) -> Iterator[Family]:
    """Every metric that has a value, in the order of the catalogue."""
    for metric in CATALOGUE:
        if metric.type is MetricType.HISTOGRAM:
            series = snapshot.distributions.get(metric.name)
            if series:
                yield _histogram(metric, series)
        elif numbers := snapshot.numbers.get(metric.name):
            kind = CounterMetricFamily if metric.type is MetricType.COUNTER else GaugeMetricFamily
            family = kind(metric.name, described(metric), labels=metric.label_names)
            for labels, value in numbers.items():
                family.add_metric(labels, value)
            yield family


def described(metric: Metric) -> str:
    """Help, unit and layer, as Prometheus shows them."""
    return f"{metric.help} Unit: {metric.unit}. Layer of diagnosis: {metric.diagnosis_layer}."


def _histogram(metric: Metric, series: Mapping[LabelValues, BucketCounts]) -> Family:
    family = HistogramMetricFamily(metric.name, described(metric), labels=metric.label_names)
    ends = (*map(str, metric.buckets), "+Inf")
    for labels, reduced in series.items():
        family.add_metric(labels, list(zip(ends, map(float, accumulate(reduced.counts)), strict=True)), reduced.total)
    return family
