"""What Prometheus costs a run: a scrape of everything that the catalogue declares, and observing a step against the
step's own CPU seconds.

`scrape`: over HTTP, with the headers of Prometheus; after a step, when every value is another than before, and
between two steps; of the exporter, and for comparison of prometheus_client's own server over a collector of the same
snapshot. `run`: parts of observing in one real run: the driver reduces signals to a snapshot (column
`observing_cpu_seconds`), the trainer counts log-ratios by bucket (timed here on as many tokens as a step has), the
doctor reads 550 rows every ten steps (timed here on rows of that run). `pairs`: the same deterministic run with and
without an exporter that is scraped every second.
"""

import argparse
import asyncio
import time
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from harness.observed_pairs import observed_pairs
from harness.runs import concord_run, parser, report
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric as Family

from orchestrator.config import parse_config
from orchestrator.exporters.prometheus import Exporter, family_of
from orchestrator.loop.live_doctor import EVERY_STEPS, FIRST_ROWS, MAX_ROWS, LiveDoctor
from orchestrator.metrics.catalogue import CATALOGUE, max_series, sizes_of
from orchestrator.metrics.distributions import Distributions
from orchestrator.metrics.snapshot import EMPTY, Snapshot
from orchestrator.metrics.state import LabelValues
from orchestrator.metrics.types import Extent, Metric, MetricType
from rollout.types.dispatch import Counts
from trainer.loss.ratio_buckets import PARTS, ratio_sums

REPLICAS, BLOCKS, HEADS = 8, 40, 32
"""Of the run whose every series is scraped."""
SCRAPES = 100
HEADERS = {
    "Accept": (
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    ),
    "Accept-Encoding": "gzip",
}
"""Of Prometheus 2."""
WARM_UP = 3
"""Steps of the run that are not counted."""


def main() -> None:
    """Print one JSON."""
    made = parser(__doc__ or "")
    made.add_argument("--config", type=Path, default=Path("examples/quickstart.toml"), help="the run that is observed")
    made.add_argument("--steps", type=int, default=30, help="its steps")
    made.add_argument("--pairs", type=int, default=20, help="pairs of runs with and without an exporter")
    made.add_argument("--only", choices=("scrape", "run", "pairs"), default=None)
    chosen: argparse.Namespace = made.parse_args()
    parts = {
        "scrape": scrape,
        "run": lambda: observing(chosen.config, chosen.steps),
        "pairs": lambda: observed_pairs(chosen.pairs),
    }
    report({name: part() for name, part in parts.items() if chosen.only in (None, name)}, chosen)


def scrape() -> dict[str, Any]:
    """Milliseconds of a scrape of every series that a large run may have."""
    config = parse_config({"engine": {"type": "vllm", "replicas": REPLICAS}}, "benchmark")
    sizes = sizes_of(config, blocks=BLOCKS, heads=HEADS)
    snapshots = [full_snapshot(sizes, places) for places in range(8)]
    return {
        "series_at_most": max_series(sizes),
        "after_a_step": scrapes(snapshots, Exporter),
        "between_steps": scrapes(snapshots[:1], Exporter),
        "library_after_a_step": scrapes(snapshots, LibraryExporter),
        "library_between_steps": scrapes(snapshots[:1], LibraryExporter),
    }


class LibraryExporter:
    """The same snapshot from the server of prometheus_client, which writes every line anew at each scrape."""

    def __init__(self, host: str, port: int) -> None:
        self._snapshot = EMPTY
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, host, registry)
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def show(self, snapshot: Snapshot) -> None:
        """Scrapes get `snapshot` from now on."""
        self._snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        """Every metric that has a value."""
        snapshot = self._snapshot
        for metric in CATALOGUE:
            if snapshot.numbers.get(metric.name) or snapshot.distributions.get(metric.name):
                yield family_of(metric, snapshot)


def scrapes(snapshots: Sequence[Snapshot], kind: type[Exporter] | type[LibraryExporter]) -> dict[str, float]:
    """Of each snapshot in turn."""
    took_ms: list[float] = []
    size = 0
    with kind("127.0.0.1", 0) as exporter:
        cpu_s = time.process_time()
        for place in range(SCRAPES):
            exporter.show(snapshots[place % len(snapshots)])
            begun = time.perf_counter()
            with urllib.request.urlopen(urllib.request.Request(exporter.url, headers=HEADERS)) as answer:
                size = len(answer.read())
            took_ms.append((time.perf_counter() - begun) * 1e3)
        cpu_s = time.process_time() - cpu_s
    return {
        "bytes": size,
        "p50_ms": float(np.percentile(took_ms, 50)),
        "p95_ms": float(np.percentile(took_ms, 95)),
        "max_ms": max(took_ms),
        "cpu_ms": cpu_s * 1e3 / SCRAPES,
    }


def full_snapshot(sizes: dict[Extent, int], number: int) -> Snapshot:
    """A value for every series that is declared, another for each `number`."""
    distributions = Distributions()
    numbers: dict[str, dict[LabelValues, float]] = {}
    for metric in CATALOGUE:
        series = series_of(metric, sizes)
        if metric.type is MetricType.HISTOGRAM:
            for labels in series:
                distributions.observe(metric.name, metric.buckets[number], *labels)
        else:
            numbers[metric.name] = dict.fromkeys(series, number + 0.123456789)
    return Snapshot(numbers=numbers, distributions=distributions.copy())


def series_of(metric: Metric, sizes: dict[Extent, int]) -> list[LabelValues]:
    """All label values of a run of these sizes."""
    return list(product(*(label.values or tuple(map(str, range(label.size(sizes)))) for label in metric.labels)))


def observing(config: Path, steps: int) -> dict[str, float]:
    """CPU seconds a step: of the whole run, and of observing it."""
    run = concord_run({"run.steps": steps}, config)
    driver_s = (run.rows[-1]["observing_cpu_seconds"] - run.rows[WARM_UP]["observing_cpu_seconds"]) / (
        len(run.rows) - 1 - WARM_UP
    )
    tokens = int(np.mean([row["tokens_per_second"] * row["step_seconds"] for row in run.rows]))
    trainer_s, doctor_s = bucket_cpu_s(tokens), doctor_cpu_s(run.rows) / EVERY_STEPS
    step_s = run.cpu_s_per_step(WARM_UP, steps)
    return {
        "steps": len(run.rows) - 1 - WARM_UP,
        "tokens_a_step": tokens,
        "step_cpu_s": step_s,
        "driver_cpu_s": driver_s,
        "trainer_cpu_s": trainer_s,
        "doctor_cpu_s": doctor_s,
        "share": (driver_s + trainer_s + doctor_s) / step_s,
    }


def bucket_cpu_s(tokens: int) -> float:
    """CPU seconds of counting the log-ratios of one step, in one micro-batch."""
    torch.set_num_threads(1)
    parts = [torch.randn(tokens) * 0.1 for _ in PARTS]
    ratio_sums(parts)
    begun = time.process_time()
    for _ in range(100):
        ratio_sums(parts)
    return (time.process_time() - begun) / 100


def doctor_cpu_s(rows: Sequence[dict[str, float]]) -> float:
    """CPU seconds of one look at as many rows as the doctor in the loop keeps."""

    async def nothing(kind: str, fields: object) -> None:
        """Where events would go."""

    doctor = LiveDoctor(nothing)
    for step in range(1, FIRST_ROWS + MAX_ROWS + 1):
        doctor.step({**rows[step % len(rows)], "step": step}, Counts(), [])
    asyncio.run(doctor.look())
    begun = time.process_time()
    for _ in range(10):
        asyncio.run(doctor.look())
    return (time.process_time() - begun) / 10


if __name__ == "__main__":
    main()
