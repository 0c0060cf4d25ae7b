"""Files `part-N.parquet` of a folder, each read once: columns of numbers and texts. One that cannot be read is
noted, and the rest is read."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.run_dir.record import Values

arrow: Any = pa
parquet: Any = pq
_NAME = re.compile(r"part-(0|[1-9][0-9]*)\.parquet")


def part_files(directory: Path) -> dict[int, Path]:
    """`part-N.parquet` by N, in its order. Other names are no parts."""
    named = [(_NAME.fullmatch(path.name), path) for path in directory.glob("part-*.parquet")]
    return dict(sorted((int(name[1]), path) for name, path in named if name))


class PartReader:
    """One folder; `new` answers with what it has not answered with before."""

    def __init__(self, directory: Path, needed: tuple[str, ...]) -> None:
        """`needed`: columns without which a part says nothing."""
        self._directory, self._needed = directory, needed
        self._read: set[Path] = set()
        self._left_out: dict[str, list[Path]] = {}

    def new(self) -> list[Any]:
        """Arrow tables of the parts that are there since the last call, in order."""
        found: list[Any] = []
        for path in part_files(self._directory).values():
            if path in self._read:
                continue
            self._read.add(path)
            try:
                table = parquet.read_table(path)
            except (OSError, ValueError) as error:
                reason = str(error).partition("\n")[0].removeprefix(f"Could not open Parquet input source '{path}': ")
                self._left_out.setdefault(reason, []).append(path)
                continue
            lacks = [name for name in self._needed if name not in table.column_names]
            if lacks:
                self._left_out.setdefault(
                    f"there is no column {', '.join(lacks)} in it, so another version of Concord wrote it", []
                ).append(path)
            else:
                found.append(table)
        return found

    def notes(self) -> list[str]:
        """What could not be read, in words: a line a reason."""
        folder = self._directory.name
        strange = sorted(path.name for path in self._directory.glob("part-*.parquet") if not _NAME.fullmatch(path.name))
        unnamed = [
            f"{folder}/{_first(strange)} is left out: a part is named part-N.parquet; rename it, or move it away"
        ]
        return (unnamed if strange else []) + [
            f"{folder}/{_first([path.name for path in paths])} cannot be read, what it holds is missing: {reason}"
            for reason, paths in self._left_out.items()
        ]


def _first(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else "".join(names)


def numbers(table: Any, name: str) -> Values:  # noqa: ANN401 - an Arrow table
    """[rows] a column; NaN where it has none, or where there is no such column."""
    if name not in table.column_names:
        return np.full(int(table.num_rows), np.nan)
    return np.asarray(table.column(name).cast(arrow.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def joined(parts: Sequence[Mapping[str, Values]], name: str) -> Values:
    """A column of all parts, one after another."""
    columns = [part[name] if name in part else np.full(len(part["step"]), np.nan) for part in parts]
    return np.concatenate(columns) if columns else np.empty(0)
