"""Reads a run directory for the doctor, again and again: metric parts, block parts and events, each only once. Never writes, never opens the store for writing.

What is missing is told, never guessed: a run that still goes on has rows in memory that no part holds yet.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pyarrow import parquet

from orchestrator.doctor.record import Record, RunEvent, record_of_rows
from orchestrator.metric_parts import part_files
from orchestrator.metrics import COLUMNS
from orchestrator.run_dir import RunDir
from rollout.errors import StoreError, UserError, boundary
from rollout.store.schema import FILE_NAME, open_for_reading
from rollout.weights import PolicyVersion

arrow: Any = parquet
ENDED = ("failed", "rejected")
QUIET = frozenset(
    (
        *("epoch_opened", "dispatched", "ready", "put_refused", "annotated", "audited", "leased", "trained", "settled", "ending_left_out"),
        *("version_committed", "version_orphaned", "step_taken_back", "returned", "trained_outside_lineage", "step_committed", *ENDED),
    )
)
"""Events of single dispatches and of the store: counted, or of no interest here."""


class RunReader:
    """One run directory; `read` answers with what there is by now."""

    def __init__(self, path: Path) -> None:
        """Check that it is a run that this version can read.

        Raises:
            UserError: no run, or one of a newer format.
        """
        self._run = RunDir(path.absolute())
        _check_run(self._run)
        self._rows: dict[int, Mapping[str, float]] = {}
        self._blocks: dict[tuple[str, str], dict[int, float]] = {}
        self._read: set[Path] = set()
        self._offset = 0
        self._numbers = 0
        self._version = 0
        self._counts: Counter[str] = Counter()
        self._counts_at: dict[int, dict[str, float]] = {}
        self._events: list[RunEvent] = []
        self._strange: set[str] = set()
        self._begins: dict[int, int] = {}
        """Trainer epoch -> its first step: a resume takes back what older epochs trained from there on."""

    def read(self) -> tuple[Record, tuple[str, ...]]:
        """The record, and what it lacks, in words.

        Raises:
            UserError: a file of the run is damaged.
        """
        self._read_events()
        for part in part_files(self._run.metrics):
            self._read_rows(part)
        for part in part_files(self._run.block_metrics):
            self._read_blocks(part)
        rows = [self._rows[step] for step in sorted(self._rows) if not self._taken_back(self._rows[step])]
        record = record_of_rows(rows, tallies=[self._tally_at(int(row["step"])) for row in rows], events=self._events, blocks=self._blocks)
        return record, tuple(self._missing(record))

    def _read_rows(self, part: Path) -> None:
        if part in self._read:
            return
        for row in _table(part):
            step = int(row.get("step") or 0)
            before = self._rows.get(step)
            if before is None or (row.get("trainer_epoch") or 0) >= (before.get("trainer_epoch") or 0):
                self._rows[step] = {name: float("nan") if value is None else float(value) for name, value in row.items()}
            self._strange |= set(row) - set(COLUMNS)
        self._read.add(part)

    def _taken_back(self, row: Mapping[str, float]) -> bool:
        return any(row["step"] >= begin for epoch, begin in self._begins.items() if epoch > row.get("trainer_epoch", 0.0))

    def _read_blocks(self, part: Path) -> None:
        if part in self._read:
            return
        for row in _table(part):
            if row["head"] is None:
                self._blocks.setdefault((row["signal"], row["block"]), {})[int(row["step"])] = float(row["value"])
        self._read.add(part)

    def _read_events(self) -> None:
        path = self._run.path / "events.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written; the next look takes it
                self._offset += len(line)
                with boundary(UserError, f"{path} is damaged at byte {self._offset - len(line)}; restore it, or take the line out"):
                    event = cast("dict[str, Any]", json.loads(line))
                    if event["number"] > self._numbers:
                        self._numbers = event["number"]
                        self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        kind = str(event["kind"])
        if kind == "step_committed":
            self._version = PolicyVersion.parse(str(event["policy"])).version
            self._counts_at[self._version] = dict(self._counts)
        elif kind == "epoch_opened":
            self._version = int(event["resumed_version"])
            self._begins[int(event["trainer_epoch"])] = self._version + 1
        elif kind in ENDED:
            self._counts[f"{kind}:{event.get('reason')}"] += 1
        if kind not in QUIET:
            self._events.append(RunEvent(kind=kind, step=self._version, fields=event))

    def _tally_at(self, step: int) -> Mapping[str, float]:
        if step >= self._version:
            return dict(self._counts)
        return self._counts_at.get(step, {})

    def _missing(self, record: Record) -> list[str]:
        run, told = self._run, list[str]()
        if not (run.path / "events.jsonl").exists():
            told.append("no events.jsonl: failures, evaluations and findings of the consistency service are not seen")
        if not record.steps.size:
            told.append("no metric part yet: no series is seen (parts are written every 50 steps, and when the loop ends)")
        elif self._version > record.last_step:
            told.append(f"steps {record.last_step + 1} to {self._version} are in no metric part yet (parts are written every 50 steps, and when the loop ends)")
        absent = sorted(set(COLUMNS) - set(record.columns)) if record.steps.size else []
        if absent:
            told.append(f"the metric parts lack {len(absent)} columns of this version ({', '.join(absent[:4])}{', ...' if len(absent) > 4 else ''})")
        if self._strange:
            told.append(f"the metric parts have {len(self._strange)} columns that are unknown here ({', '.join(sorted(self._strange)[:4])}): not read")
        if not run.summary.exists():
            told.append("no summary.json: the run still goes on, or an error ended it")
        return told


def _check_run(run: RunDir) -> None:
    if not run.config.is_file():
        raise UserError(f"{run.path} is not a run directory: {run.config} is missing; give the folder that `concord run` printed")
    with boundary(UserError, f"{run.config} is no JSON; restore it"):
        json.loads(run.config.read_text())
    if (run.path / FILE_NAME).exists():
        try:
            open_for_reading(run.path / FILE_NAME).close()
        except StoreError as error:
            raise UserError(str(error)) from error


def _table(part: Path) -> list[dict[str, Any]]:
    with boundary(UserError, f"{part} cannot be read as Parquet; restore it, or move it away to see the rest"):
        return cast("list[dict[str, Any]]", arrow.read_table(part).to_pylist())
