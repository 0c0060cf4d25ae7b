"""Writes one row a step into `metrics/part-N.parquet`, and one a step, block and signal into `block_metrics/part-N.parquet`.

Knows the catalogue; refuses anything that is not in it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.block_signals import BlockValue
from orchestrator.metrics import BLOCK_CATALOGUE, COLUMNS
from rollout.errors import ConcordError
from rollout.weights import PolicyVersion

arrow: Any = pa
parquet: Any = pq
SCHEMA: Any = arrow.schema([(column, arrow.float64()) for column in COLUMNS])
BLOCK_SCHEMA: Any = arrow.schema(
    [
        *(("trainer_epoch", arrow.int64()), ("step", arrow.int64())),
        *(("block", arrow.string()), ("head", arrow.int64()), ("signal", arrow.string()), ("value", arrow.float64())),
    ]
)
_LABELS = {metric.column: metric.label_names for metric in BLOCK_CATALOGUE}


class Parts:
    """Files `part-N.parquet` of one folder, each complete or absent; numbers go on where they are."""

    def __init__(self, directory: Path, schema: Any) -> None:  # noqa: ANN401
        self._directory, self._schema = directory, schema
        directory.mkdir(parents=True, exist_ok=True)
        self._next_part = 1 + max((int(path.stem.removeprefix("part-")) for path in directory.glob("part-*.parquet")), default=-1)

    def write(self, rows: Sequence[Mapping[str, object]]) -> None:
        """The next part; none without rows."""
        if not rows:
            return
        path = self._directory / f"part-{self._next_part}.parquet"
        temporary = path.with_name(f".{path.name}.tmp")
        parquet.write_table(arrow.Table.from_pylist(list(rows), schema=self._schema), temporary)
        temporary.rename(path)
        self._next_part += 1


class MetricsRecorder:
    """Buffers rows and writes a part every `rows_per_part` steps, and whenever it is told to."""

    def __init__(self, directory: Path, rows_per_part: int = 50) -> None:
        self._parts = Parts(directory, SCHEMA)
        self._rows_per_part = rows_per_part
        self._rows: list[Mapping[str, float]] = []

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
        self._parts.write(self._rows)
        self._rows.clear()


class BlockRecorder:
    """Buffers the values of blocks and writes a part every `steps_per_part` steps, and whenever it is told to."""

    def __init__(self, directory: Path, steps_per_part: int = 50) -> None:
        self._parts = Parts(directory, BLOCK_SCHEMA)
        self._steps_per_part = steps_per_part
        self._rows: list[Mapping[str, object]] = []
        self._steps = 0

    def add(self, policy: PolicyVersion, values: Sequence[BlockValue]) -> None:
        """The step that produced `policy`, with as many values as it has.

        Raises:
            ConcordError: a signal is not declared, or not with these labels.
        """
        for one in values:
            labels = ("block",) if one.head is None else ("block", "head")
            if _LABELS.get(one.signal) != labels:
                raise ConcordError(f"got a value of {one.signal} with labels {labels}, declared are {_LABELS.get(one.signal)}; see orchestrator/metrics.py")
        of_step = {"trainer_epoch": policy.trainer_epoch, "step": policy.version}
        self._rows += [{**of_step, "block": one.block, "head": one.head, "signal": one.signal, "value": one.value} for one in values]
        self._steps += 1
        if self._steps >= self._steps_per_part:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        self._parts.write(self._rows)
        self._rows.clear()
        self._steps = 0
