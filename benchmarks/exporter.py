"""What Prometheus costs a run: a scrape of everything that the catalogue declares, and observing a step against the step's own CPU seconds.

Observing has two halves: the driver reduces signals to a snapshot (measured by the run itself, column `observing_cpu_seconds`), and the trainer counts
log-ratios by bucket (timed here on as many tokens as a step of that run has).
"""

import argparse
import time
import urllib.request
from itertools import product
from pathlib import Path

import numpy as np
import torch
from harness import concord_run, parser, report

from orchestrator.config import parse_config
from orchestrator.distributions import Distributions, LabelValues
from orchestrator.exporter import Exporter
from orchestrator.metric_types import Extent, Metric, MetricType
from orchestrator.metrics import CATALOGUE, max_series, sizes_of
from orchestrator.snapshot import Snapshot
from trainer.ratio_buckets import PARTS, ratio_sums

REPLICAS, BLOCKS, HEADS = 8, 40, 32
"""Of the run whose every series is scraped."""
SCRAPES = 50
WARM_UP = 3
"""Steps of the run that are not counted."""


def main() -> None:
    """Print one JSON."""
    made = parser(__doc__ or "")
    made.add_argument("--config", type=Path, default=Path("examples/quickstart.toml"), help="the run that is observed")
    made.add_argument("--steps", type=int, default=30, help="its steps")
    arguments: argparse.Namespace = made.parse_args()
    report({"scrape": scrape(), "observing": observing(arguments.config, arguments.steps)}, arguments)


def scrape() -> dict[str, float]:
    """Milliseconds of a scrape of every series that a large run may have."""
    config = parse_config({"engine": {"type": "vllm", "replicas": REPLICAS}}, "benchmark")
    sizes = sizes_of(config, blocks=BLOCKS, heads=HEADS)
    full = full_snapshot(sizes)
    with Exporter("127.0.0.1", 0) as exporter:
        exporter.show(full)
        took_ms: list[float] = []
        size, cpu_s = 0, time.process_time()
        for _ in range(SCRAPES):
            begun = time.perf_counter()
            with urllib.request.urlopen(exporter.url) as answer:
                size = len(answer.read())
            took_ms.append((time.perf_counter() - begun) * 1e3)
        cpu_s = time.process_time() - cpu_s
    return {
        "series_at_most": max_series(sizes),
        "bytes": size,
        "p50_ms": float(np.percentile(took_ms, 50)),
        "p95_ms": float(np.percentile(took_ms, 95)),
        "max_ms": max(took_ms),
        "cpu_ms": cpu_s * 1e3 / SCRAPES,
    }


def full_snapshot(sizes: dict[Extent, int]) -> Snapshot:
    """A value for every series that is declared."""
    distributions = Distributions()
    numbers: dict[str, dict[LabelValues, float]] = {}
    for metric in CATALOGUE:
        series = series_of(metric, sizes)
        if metric.type is MetricType.HISTOGRAM:
            distributions.begin(metric.name, series)
        else:
            numbers[metric.name] = dict.fromkeys(series, 0.123456789)
    return Snapshot(numbers=numbers, distributions=distributions.copy())


def series_of(metric: Metric, sizes: dict[Extent, int]) -> list[LabelValues]:
    """All label values of a run of these sizes."""
    return list(product(*(label.values or tuple(map(str, range(label.size(sizes)))) for label in metric.labels)))


def observing(config: Path, steps: int) -> dict[str, float]:
    """CPU seconds a step: of the whole run, and of observing it."""
    run = concord_run({"run.steps": steps}, config)
    driver_s = (run.rows[-1]["observing_cpu_seconds"] - run.rows[WARM_UP]["observing_cpu_seconds"]) / (len(run.rows) - 1 - WARM_UP)
    tokens = int(np.mean([row["tokens_per_second"] * row["step_seconds"] for row in run.rows]))
    trainer_s = bucket_cpu_s(tokens)
    step_s = run.cpu_s_per_step(WARM_UP, steps)
    return {
        "steps": len(run.rows) - 1 - WARM_UP,
        "tokens_a_step": tokens,
        "step_cpu_s": step_s,
        "driver_cpu_s": driver_s,
        "trainer_cpu_s": trainer_s,
        "share": (driver_s + trainer_s) / step_s,
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


if __name__ == "__main__":
    main()
