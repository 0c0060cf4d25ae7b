"""Histograms on disk: `histograms/part-N.parquet` holds what was counted, by bucket, in the steps since the part before it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from orchestrator.distributions import Distributions, LabelValues
from orchestrator.metric_parts import part_files
from orchestrator.metrics import DECLARED
from orchestrator.recorder import Parts

arrow: Any = pa
parquet: Any = pq
SCHEMA: Any = arrow.schema(
    [("last_step", arrow.int64()), ("signal", arrow.string()), ("labels", arrow.string()), ("upper", arrow.float64()), ("count", arrow.int64())]
)


class HistogramRecorder:
    """Writes what was counted since its last part, every `steps_per_part` steps and at the end."""

    def __init__(self, directory: Path, counted: Distributions, steps_per_part: int = 50) -> None:
        self._parts, self._counted, self._steps_per_part = Parts(directory, SCHEMA), counted, steps_per_part
        self._steps = 0
        self._last_step = 0
        self._written: dict[tuple[str, LabelValues], tuple[int, ...]] = {}

    def add(self, step: int) -> None:
        """A step ended."""
        self._last_step = step
        self._steps += 1
        if self._steps >= self._steps_per_part:
            self.flush()

    def flush(self) -> None:
        """Write the next part, unless nothing new was counted."""
        counted = self._counted.copy()
        self._parts.write([row for name, series in counted.items() for labels, now in series.items() for row in self._rows(name, labels, now.counts)])
        self._steps = 0

    def _rows(self, name: str, labels: LabelValues, now: tuple[int, ...]) -> list[dict[str, object]]:
        metric = DECLARED[name]
        before = self._written.get((name, labels), (0,) * len(now))
        if now == before:
            return []
        self._written[name, labels] = now
        told = ",".join(f"{label}={value}" for label, value in zip(metric.label_names, labels, strict=True))
        where = {"last_step": self._last_step, "signal": metric.column, "labels": told}
        # Empty buckets come along: a reader learns the buckets from the rows.
        return [{**where, "upper": end, "count": new - old} for end, new, old in zip((*metric.buckets, math.inf), now, before, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histograms:
    """All parts of a run, added up."""

    counts: Mapping[str, Mapping[str, NDArray[np.int64]]]
    """By signal (a name of the catalogue without `concord_`) and labels (`name=value`, joined by commas): values a bucket."""
    ends: Mapping[str, Sequence[float]]
    """Upper ends of a signal's buckets; the last is infinite."""
    notes: tuple[str, ...]

    def of(self, signal: str) -> Mapping[str, NDArray[np.int64]]:
        """By labels; empty where nothing was counted."""
        return self.counts.get(signal, {})

    def uppers(self, signal: str) -> Sequence[float]:
        """Upper ends of its buckets."""
        return self.ends.get(signal, ())


def read_histograms(directory: Path) -> Histograms:
    """Add up the parts. One that cannot be read is noted, and its counts are missing."""
    tables: list[Any] = []
    notes: list[str] = []
    for path in part_files(directory):
        try:
            tables.append(parquet.read_table(path, schema=SCHEMA))
        except (OSError, ValueError) as error:
            notes.append(f"{path.name} of the histograms cannot be read, its counts are missing: {str(error).partition(chr(10))[0]}")
    rows = cast("list[dict[str, Any]]", arrow.concat_tables(tables).to_pylist()) if tables else []
    ends = {signal: sorted({float(row["upper"]) for row in rows if row["signal"] == signal}) for signal in sorted({row["signal"] for row in rows})}
    counts: dict[str, dict[str, NDArray[np.int64]]] = {}
    for row in rows:
        of_signal = counts.setdefault(row["signal"], {})
        found = of_signal.setdefault(row["labels"], np.zeros(len(ends[row["signal"]]), np.int64))
        found[ends[row["signal"]].index(row["upper"])] += row["count"]
    return Histograms(counts=counts, ends=ends, notes=tuple(notes))
