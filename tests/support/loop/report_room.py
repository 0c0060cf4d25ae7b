"""Run directories to report on: a real scripted run in this process, and what no healthy run leaves behind, planted
afterwards."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from support.loop.loop_case import Case

from orchestrator.metrics.catalogue import DECLARED
from orchestrator.metrics.distributions import Distributions
from orchestrator.run_dir.histogram_writer import HistogramRecorder
from orchestrator.run_dir.layout import RunDir
from rollout.types.weights import PolicyVersion
from trainer.types.histograms import BucketCounts, bucket_counts


def scripted_run(folder: Path, *overrides: str) -> RunDir:
    """A run of twelve steps, or what `overrides` say."""
    case = Case(
        folder, "run.steps=12", "engine.latency_mean_s=0.004", "engine.latency_sigma=1.0", "engine.slots=8", *overrides
    )
    case.drive()
    return case.run


def plant_event(run: RunDir, kind: str, after_step: int, **fields: object) -> None:
    """An event half-way between a step and the next."""
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    at = {
        PolicyVersion.parse(event["policy"]).version: event["at_s"]
        for event in events
        if event["kind"] == "step_committed"
    }
    when = (at[after_step] + at[after_step + 1]) / 2
    with run.events.open("a") as file:
        file.write(
            json.dumps({"number": 1 + max(event["number"] for event in events), "at_s": when, "kind": kind, **fields})
            + "\n"
        )


def plant_gap(run: RunDir, after_step: int, **nats: float) -> None:
    """A finding of the consistency service: causes with their nats, which add up to the gap."""
    fields = {f"{cause}_nats": value for cause, value in nats.items()}
    plant_event(
        run,
        "consistency_finding",
        after_step,
        replica=0,
        policy=f"e1-v{after_step}",
        cause="routing",
        gap_nats=sum(nats.values()),
        **fields,
    )


def plant_histograms(run: RunDir, seed: int = 0) -> None:
    """Ages and ratios of ten thousand tokens, as mode gate counts them."""
    draw = np.random.default_rng(seed)
    engine, stale = draw.normal(0, 0.01, 10_000), draw.normal(0, 0.08, 10_000)
    ages = draw.choice([0.0, 1.0, 2.0], 10_000, p=[0.2, 0.5, 0.3])
    counted = Distributions()
    counted.add("concord_token_staleness_steps", by_bucket("concord_token_staleness_steps", ages))
    for part, values in (("total", engine + stale), ("engine", engine), ("stale", stale)):
        counted.add("concord_log_ratio_nats", by_bucket("concord_log_ratio_nats", values), part)
    recorder = HistogramRecorder(run.histograms, counted, PolicyVersion(1, 0))
    recorder.add(PolicyVersion(1, 12))
    recorder.flush()


def by_bucket(name: str, values: NDArray[np.float64]) -> BucketCounts:
    """Values by the buckets of a declared histogram."""
    return bucket_counts(values, DECLARED[name].buckets)
