"""The histogram parts of a run, added up over the steps that count."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from orchestrator.run_dir.lineage import Lineage
from orchestrator.run_dir.parts import PartReader


@dataclass(frozen=True, slots=True, kw_only=True)
class Histograms:
    """All parts of a run, added up."""

    counts: Mapping[str, Mapping[str, NDArray[np.int64]]]
    """Values in each bucket, by signal (a name of the catalogue without `concord_`) and labels (`name=value`, joined by
    commas)."""
    ends: Mapping[str, Sequence[float]]
    """Upper ends of a signal's buckets; the last is infinite."""
    notes: tuple[str, ...]

    def of(self, signal: str) -> Mapping[str, NDArray[np.int64]]:
        """Counts of a signal by labels; empty where nothing was counted."""
        return self.counts.get(signal, {})

    def uppers(self, signal: str) -> Sequence[float]:
        """Upper ends of its buckets."""
        return self.ends.get(signal, ())


def read_histograms(directory: Path, lineage: Lineage) -> Histograms:
    """Add up the parts of steps that count. One that cannot be read is noted, and its counts are missing."""
    parts = PartReader(directory, ("trainer_epoch", "last_step", "signal", "labels", "upper", "count"))
    rows = [
        row
        for table in parts.new()
        for row in cast("list[dict[str, Any]]", table.to_pylist())
        if lineage.counts(row["trainer_epoch"], row["last_step"])
    ]
    ends = {
        signal: sorted({float(row["upper"]) for row in rows if row["signal"] == signal})
        for signal in sorted({row["signal"] for row in rows})
    }
    counts: dict[str, dict[str, NDArray[np.int64]]] = {}
    for row in rows:
        of_signal = counts.setdefault(row["signal"], {})
        found = of_signal.setdefault(row["labels"], np.zeros(len(ends[row["signal"]]), np.int64))
        found[ends[row["signal"]].index(row["upper"])] += row["count"]
    return Histograms(counts=counts, ends=ends, notes=tuple(parts.notes()))
