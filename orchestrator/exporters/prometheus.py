"""Serves the newest snapshot to Prometheus over HTTP, in threads of its own. It knows the catalogue and no loop; a
scrape never makes the loop wait."""

import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

from prometheus_client import generate_latest, utils
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family

from orchestrator.metrics.catalogue import CATALOGUE
from orchestrator.metrics.snapshot import EMPTY, Snapshot
from orchestrator.metrics.state import LabelValues
from orchestrator.metrics.types import Metric, MetricType
from rollout.errors import UserError
from rollout.transport.scrape_server import ScrapeServer
from trainer.types.histograms import BucketCounts

_utils: Any = utils
number_text: Callable[[float], str] = _utils.floatToGoString


LAST_SCRAPES = 2
"""Of the state in which a run ended by an error: one may have begun before, so two have seen it whole."""
LAST_STATE_S = 30.0
"""How long the end of such a run waits for them: two scrapes at Prometheus' usual interval."""


class Exporter:
    """Listens from its making until `close`. A context manager."""

    def __init__(self, host: str, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Listen on `port` of `host`; 0 takes a free one. `clock`: seconds, rising.

        Raises:
            UserError: the port is taken, or the host is no address of this machine.
        """
        self._clock = clock
        self._shown = (EMPTY, clock())
        text = Text()

        def now() -> bytes:
            snapshot, taken_s = self._shown
            return text.of(snapshot, clock() - taken_s)

        try:
            self._server = ScrapeServer(host, port, now)
        except OSError as cause:
            raise UserError(
                f"cannot serve metrics on {host}:{port}: {cause.strerror or cause}; set exporter.port to a free port, "
                "or to 0 for any, and exporter.host to an address of this machine"
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
        return f"http://{self.target}/metrics"

    @property
    def snapshot(self) -> Snapshot:
        return self._shown[0]

    def show(self, snapshot: Snapshot) -> None:
        """Scrapes get `snapshot`, which was taken now, from now on."""
        self._shown = (snapshot, self._clock())

    def let_last_state_be_scraped(self, deadline_s: float = LAST_STATE_S) -> bool:
        """Go on serving what is shown until it was scraped, so that alerts can say in which state the run ended.

        Returns at once where nobody has scraped this run so far; else after LAST_SCRAPES more, or at the deadline. Says
        whether they came.
        """
        return self._server.asked and self._server.wait_for_scrapes(LAST_SCRAPES, deadline_s)

    def close(self) -> None:
        self._server.close()


class Text:
    """Snapshots as Prometheus reads them. What stands before a number is written once for each series, since that is
    most of the work."""

    def __init__(self) -> None:
        self._openings: dict[str, _Openings] = {}

    def of(self, snapshot: Snapshot, age_s: float = 0.0) -> bytes:
        """Every metric that has a value, in the order of the catalogue, `age_s` after it was taken."""
        return "".join(self._lines_of(metric, snapshot, age_s) for metric in CATALOGUE).encode()

    def _lines_of(self, metric: Metric, snapshot: Snapshot, age_s: float) -> str:
        values = (snapshot.distributions if metric.type is MetricType.HISTOGRAM else snapshot.numbers).get(metric.name)
        if not values:
            return ""
        family, series = family_of(metric, snapshot), tuple(values)
        known = self._openings.get(metric.name)
        if known is None or known.series != series:
            known = self._openings[metric.name] = _openings(series, family)
        lines = [
            f"{opening} {number_text(sample.value + age_s if metric.grows else sample.value)}\n"
            for opening, sample in zip(known.samples, family.samples, strict=True)
        ]
        return known.head + "".join(lines)


@dataclass(frozen=True, slots=True)
class _Openings:
    """The text of a metric without its numbers."""

    series: tuple[LabelValues, ...]
    head: str
    """Its two lines of comment."""
    samples: tuple[str, ...]
    """Name and labels of each sample."""


def _openings(series: tuple[LabelValues, ...], family: Family) -> _Openings:
    comment, kind, *lines = generate_latest(_One(family)).decode().removesuffix("\n").split("\n")
    return _Openings(series, f"{comment}\n{kind}\n", tuple(line.rpartition(" ")[0] for line in lines))


class _One:
    """What prometheus_client writes out."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Family]:
        yield self._family


def described(metric: Metric) -> str:
    """Help, unit and layer, as Prometheus shows them."""
    return f"{metric.help} Unit: {metric.unit}. Layer of diagnosis: {metric.diagnosis_layer}."


def family_of(metric: Metric, snapshot: Snapshot) -> Family:
    """The values of one metric, as prometheus_client has them."""
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
