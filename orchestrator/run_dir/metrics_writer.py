"""Writes one row a step into `metrics/part-N.parquet`, and one a step, block and signal into
`block_metrics/part-N.parquet`.

Knows the catalogue; refuses anything that is not in it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.metrics.blocks import BlockValue
from orchestrator.metrics.catalogue import BLOCK_CATALOGUE, COLUMNS
from orchestrator.run_dir.parts import part_files
from rollout.errors import ConcordError, UserError, boundary
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.durable import sync

arrow: Any = pa
parquet: Any = pq
SCHEMA: Any = arrow.schema([(column, arrow.float64()) for column in COLUMNS])
BLOCK_SCHEMA: Any = arrow.schema(
    [
        *(("trainer_epoch", arrow.int64()), ("step", arrow.int64())),
        *(("block", arrow.string()), ("head", arrow.int64()), ("signal", arrow.string()), ("value", arrow.float64())),
    ]
)
MOST_HELD_STEPS = 1000
"""Newest steps that wait in memory for a disk that takes them."""
_LABELS = {metric.column: metric.label_names for metric in BLOCK_CATALOGUE}


class Parts:
    """Files `part-N.parquet` of one folder, each complete or absent; numbers go on where they are."""

    def __init__(self, directory: Path, schema: Any) -> None:  # noqa: ANN401
        self._directory, self._schema = directory, schema
        with boundary(UserError, f"cannot make {directory} (free space, or let the run directory be written)"):
            directory.mkdir(parents=True, exist_ok=True)
        self._next_part = 1 + max(part_files(directory), default=-1)

    def write(self, rows: Sequence[Mapping[str, object]]) -> None:
        """The next part; none without rows. Raises OSError, and there is none then."""
        if not rows:
            return
        path = self._directory / f"part-{self._next_part}.parquet"
        temporary = path.with_name(f".{path.name}.tmp")
        parquet.write_table(arrow.Table.from_pylist(list(rows), schema=self._schema), temporary)
        sync(temporary)
        temporary.rename(path)
        sync(self._directory)
        self._next_part += 1


class _Buffer:
    """The rows of the steps that no part holds yet, step by step. Those that a disk refuses wait for the next part, the
    newest `MOST_HELD_STEPS`."""

    def __init__(self, parts: Parts, steps_per_part: int) -> None:
        self._parts, self._steps_per_part = parts, steps_per_part
        self._steps: deque[Sequence[Mapping[str, object]]] = deque(maxlen=MOST_HELD_STEPS)
        self._since = 0

    def _hold(self, rows: Sequence[Mapping[str, object]]) -> None:
        """One step; every so many are written. Raises OSError as `flush`."""
        self._steps.append(rows)
        self._since += 1
        if self._since >= self._steps_per_part:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered.

        Raises:
            OSError: the disk refuses it; it is kept.
        """
        self._since = 0
        self._parts.write([row for rows in self._steps for row in rows])
        self._steps.clear()


class MetricsRecorder(_Buffer):
    """Buffers rows and writes a part every `rows_per_part` steps, and at every `flush`."""

    def __init__(self, directory: Path, rows_per_part: int = 50) -> None:
        super().__init__(Parts(directory, SCHEMA), rows_per_part)

    def add(self, row: Mapping[str, float]) -> None:
        """One step.

        Raises:
            ConcordError: a name is not declared, or a declared one is missing.
            OSError: a part was due, and the disk refuses it; its rows are kept for the next one.
        """
        if set(row) != set(COLUMNS):
            raise ConcordError(
                f"metric row has undeclared {sorted(set(row) - set(COLUMNS))} and lacks "
                f"{sorted(set(COLUMNS) - set(row))}; declare metrics in orchestrator/metrics"
            )
        self._hold((row,))


class BlockRecorder(_Buffer):
    """Buffers the values of blocks and writes a part every `steps_per_part` steps, and at every `flush`."""

    def __init__(self, directory: Path, steps_per_part: int = 50) -> None:
        super().__init__(Parts(directory, BLOCK_SCHEMA), steps_per_part)

    def add(self, policy: PolicyVersion, values: Sequence[BlockValue]) -> None:
        """The step that produced `policy`, with as many values as it has.

        Raises:
            ConcordError: a signal is not declared, or not with these labels.
            OSError: a part was due, and the disk refuses it; its rows are kept for the next one.
        """
        for one in values:
            labels = ("block",) if one.head is None else ("block", "head")
            if _LABELS.get(one.signal) != labels:
                raise ConcordError(
                    f"got a value of {one.signal} with labels {labels}, declared are {_LABELS.get(one.signal)}; see "
                    "orchestrator/metrics"
                )
        of_step = {"trainer_epoch": policy.trainer_epoch, "step": policy.version}
        self._hold(
            [
                {**of_step, "block": one.block, "head": one.head, "signal": one.signal, "value": one.value}
                for one in values
            ]
        )
