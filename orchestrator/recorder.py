"""Writes one row a step into `metrics/part-N.parquet`. Knows the catalogue; refuses anything that is not in it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.metrics import COLUMNS
from rollout.errors import ConcordError

arrow: Any = pa
parquet: Any = pq
SCHEMA: Any = arrow.schema([(column, arrow.float64()) for column in COLUMNS])


class MetricsRecorder:
    """Buffers rows and writes a part (complete or absent) every `rows_per_part` steps and at the end."""

    def __init__(self, directory: Path, rows_per_part: int = 50) -> None:
        self._directory = directory
        self._rows_per_part = rows_per_part
        self._rows: list[Mapping[str, float]] = []
        directory.mkdir(parents=True, exist_ok=True)
        self._next_part = 1 + max((int(path.stem.removeprefix("part-")) for path in directory.glob("part-*.parquet")), default=-1)

    def add(self, row: Mapping[str, float]) -> None:
        """One step.

        Raises:
            ConcordError: a name is not declared, or a declared one is missing.
        """
        if set(row) != set(COLUMNS):
            raise ConcordError(
                f"metric row has undeclared {sorted(set(row) - set(COLUMNS))} and lacks {sorted(set(COLUMNS) - set(row))}; declare metrics "
                "in orchestrator/metrics.py"
            )
        self._rows.append(row)
        if len(self._rows) >= self._rows_per_part:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        if not self._rows:
            return
        path = self._directory / f"part-{self._next_part}.parquet"
        temporary = path.with_name(f".{path.name}.tmp")
        parquet.write_table(arrow.Table.from_pylist(list(self._rows), schema=SCHEMA), temporary)
        temporary.rename(path)
        self._next_part += 1
        self._rows.clear()
