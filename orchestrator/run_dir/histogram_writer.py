"""Histograms on disk: `histograms/part-N.parquet` holds what was counted, by bucket, in the steps since the part before
it.

A part ends at every checkpoint, so a resume takes whole parts back and never half of one.
"""

import math
from pathlib import Path
from typing import Any

import pyarrow as pa

from orchestrator.metrics.catalogue import DECLARED
from orchestrator.metrics.distributions import Distributions
from orchestrator.metrics.state import LabelValues
from orchestrator.metrics.types import labels_text
from orchestrator.run_dir.metrics_writer import Parts
from rollout.types.weights import PolicyVersion

arrow: Any = pa
SCHEMA: Any = arrow.schema(
    [
        *(("trainer_epoch", arrow.int64()), ("last_step", arrow.int64())),
        *(("signal", arrow.string()), ("labels", arrow.string()), ("upper", arrow.float64()), ("count", arrow.int64())),
    ]
)


class HistogramRecorder:
    """Writes what was counted since its last part, every `steps_per_part` steps, and at every `flush`."""

    def __init__(self, directory: Path, counted: Distributions, start: PolicyVersion, steps_per_part: int = 50) -> None:
        self._parts, self._counted, self._steps_per_part = Parts(directory, SCHEMA), counted, steps_per_part
        self._steps = 0
        self._newest = start
        self._written: dict[tuple[str, LabelValues], tuple[int, ...]] = {}

    def add(self, policy: PolicyVersion) -> None:
        """The step that produced `policy` ended."""
        self._newest = policy
        self._steps += 1
        if self._steps >= self._steps_per_part:
            self.flush()

    def flush(self) -> None:
        """Write the next part, unless nothing new was counted. Raises OSError; what the disk refuses is in the next
        part."""
        self._steps = 0
        counted = {
            (name, labels): now.counts
            for name, series in self._counted.copy().items()
            for labels, now in series.items()
        }
        self._parts.write([row for (name, labels), now in counted.items() for row in self._rows(name, labels, now)])
        self._written = counted

    def _rows(self, name: str, labels: LabelValues, now: tuple[int, ...]) -> list[dict[str, object]]:
        metric = DECLARED[name]
        before = self._written.get((name, labels), (0,) * len(now))
        if now == before:
            return []
        newest = self._newest
        where = {
            "trainer_epoch": newest.trainer_epoch,
            "last_step": newest.version,
            "signal": metric.column,
            "labels": labels_text(metric.label_names, labels),
        }
        # Empty buckets come along: a reader learns the buckets from the rows.
        return [
            {**where, "upper": end, "count": new - old}
            for end, new, old in zip((*metric.buckets, math.inf), now, before, strict=True)
        ]
