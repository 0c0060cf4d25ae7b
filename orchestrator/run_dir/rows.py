"""The metric parts and the block parts of a run as series over the steps that count."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from orchestrator.metrics.catalogue import COLUMNS
from orchestrator.run_dir.lineage import Lineage
from orchestrator.run_dir.parts import PartReader, joined, numbers
from orchestrator.run_dir.record import Values

compute: Any = pc


class StepRows:
    """`metrics/`: one row a step."""

    def __init__(self, directory: Path) -> None:
        self._parts = PartReader(directory, ("step", "trainer_epoch"))
        self._read: list[Mapping[str, Values]] = []
        self._columns: set[str] = set()

    def read(self) -> None:
        for table in self._parts.new():
            self._columns |= set(table.column_names)
            self._read.append({name: numbers(table, name) for name in COLUMNS if name in table.column_names})

    def lineage(self, resumed: Mapping[int, int]) -> Lineage:
        """The run's lineage: what events say of resumes, and where they do not, what rows do."""
        return Lineage(resumed).with_rows(joined(self._read, "trainer_epoch"), joined(self._read, "step"))

    def all(self, lineage: Lineage) -> dict[str, Values]:
        """[n] by column, by step; rows that a resume took back are left out, and columns that no part has."""
        steps, epochs = joined(self._read, "step"), joined(self._read, "trainer_epoch")
        kept = np.flatnonzero(lineage.count(epochs, steps) & np.isfinite(steps))
        kept = kept[np.argsort(steps[kept], kind="stable")]
        return {name: joined(self._read, name)[kept] for name in COLUMNS if name in self._columns}

    def notes(self) -> list[str]:
        """What could not be read, or is not known here."""
        notes = self._parts.notes()
        absent, strange = sorted(set(COLUMNS) - self._columns), sorted(self._columns - set(COLUMNS))
        if self._columns and absent:
            notes.append(
                f"the metric parts lack {len(absent)} columns of this version of Concord ({_some(absent)}): what needs "
                "them has no data"
            )
        if strange:
            notes.append(
                f"the metric parts have {len(strange)} columns that this version of Concord does not know "
                f"({_some(strange)}): not read"
            )
        return notes


class BlockRows:
    """`block_metrics/`: one row a step, block and signal."""

    def __init__(self, directory: Path) -> None:
        self._parts = PartReader(directory, ("trainer_epoch", "step", "block", "head", "signal", "value"))
        self._read: dict[tuple[str, str], list[NDArray[np.float64]]] = {}

    def read(self) -> None:
        """Take what is new. Values of single heads stay on disk."""
        for table in self._parts.new():
            of_blocks = table.filter(compute.is_null(table.column("head")))
            names = cast("list[str]", of_blocks.column("signal").to_pylist())
            blocks = cast("list[str]", of_blocks.column("block").to_pylist())
            values = np.stack([numbers(of_blocks, name) for name in ("trainer_epoch", "step", "value")])
            places: dict[tuple[str, str], list[int]] = {}
            for place, key in enumerate(zip(names, blocks, strict=True)):
                places.setdefault(key, []).append(place)
            for key, found in places.items():
                self._read.setdefault(key, []).append(values[:, found])

    def all(self, steps: NDArray[np.int64], lineage: Lineage) -> dict[tuple[str, str], Values]:
        """(signal, block) -> [n] at `steps`; NaN where it was not measured."""
        return {key: _at(steps, np.concatenate(read, axis=1), lineage) for key, read in self._read.items()}

    def notes(self) -> list[str]:
        return self._parts.notes()


def _at(steps: NDArray[np.int64], rows: NDArray[np.float64], lineage: Lineage) -> Values:
    _, at, values = rows[:, lineage.count(rows[0], rows[1])]
    found = np.full(steps.size, np.nan)
    _, places, of_rows = np.intersect1d(steps, at, return_indices=True)
    found[places] = values[of_rows]
    return found


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
