"""Reads the metric parts of a run back into columns: one row a step of the run's lineage, whatever resumes have left behind."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from orchestrator.metrics import COLUMNS, DECLARED

parquet: Any = pq
Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRows:
    """The steps that are on disk, in order. A part is written every 50 steps, so those of a run that goes on end a little behind it."""

    columns: Mapping[str, Column]
    """Each of the catalogue's columns, [steps]; NaN where it was not measured or not recorded."""
    notes: tuple[str, ...]
    """What could not be read, in words."""

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, column: str) -> Column:
        return self.columns[column]

    @property
    def last_step(self) -> int:
        """The newest step on disk; 0 without any."""
        return int(self["step"][-1]) if len(self) else 0


def read_rows(directory: Path) -> MetricRows:
    """The rows in `metrics/`. A part that cannot be read is noted, and its steps are missing."""
    read: list[Mapping[str, Column]] = []
    notes: list[str] = []
    unknown: set[str] = set()
    for path in part_files(directory):
        try:
            table = parquet.read_table(path)
        except (OSError, ValueError) as error:
            notes.append(f"{path.name} of the metric parts cannot be read, its steps are missing: {_first_line(error)}")
            continue
        unknown |= set(table.column_names) - set(COLUMNS)
        read.append({name: _column(table, name) for name in COLUMNS})
    if unknown:
        notes.append(f"the metric parts have columns that this version of Concord does not know, and that are not shown: {', '.join(sorted(unknown))}")
    columns = {name: np.concatenate([part[name] for part in read]) if read else np.empty(0) for name in COLUMNS}
    kept = _lineage(columns["step"], columns["trainer_epoch"])
    return MetricRows(columns={name: values[kept] for name, values in columns.items()}, notes=tuple(notes))


def part_files(directory: Path) -> list[Path]:
    """`part-N.parquet` in the order of N."""
    return sorted(directory.glob("part-*.parquet"), key=lambda path: int(path.stem.removeprefix("part-")))


def _column(table: Any, name: str) -> Column:  # noqa: ANN401 - an Arrow table
    if name not in table.column_names:
        return np.full(int(table.num_rows), np.nan)
    values: Column = np.array(table.column(name).to_pylist(), dtype=np.float64)
    values[values == DECLARED[f"concord_{name}"].unmeasured] = np.nan
    return values


def _lineage(steps: Column, epochs: Column) -> NDArray[np.intp]:
    """Places of the rows that count, by step: a resume takes back the steps from its first one on, and trains them again."""
    begins = {float(epoch): float(steps[epochs == epoch].min()) for epoch in np.unique(epochs)}
    taken_back = np.zeros(len(steps), dtype=bool)
    for later, begin in begins.items():
        taken_back |= (epochs < later) & (steps >= begin)
    kept = np.flatnonzero(~taken_back)
    return kept[np.argsort(steps[kept], kind="stable")]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
