"""A read-only look at the store of a running or finished run, for `concord explain`, reports and audits. It changes
nothing and needs no epoch."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.store.sqlite.records import DISPATCH_COLUMNS, LEDGER, dispatch_of, ledger_entry
from rollout.store.sqlite.schema import FILE_NAME, open_for_reading, store_errors
from rollout.store.sqlite.segments import DIRECTORY, SegmentPlace, SegmentReader
from rollout.store.sqlite.tally import Tally, count_slots
from rollout.types.codec import compact_json, decode
from rollout.types.dispatch import Counts, Dispatch, DispatchState, LedgerEntry, StepCommit
from rollout.types.trajectory import Annotation, TrajectoryGroup
from rollout.types.weights import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchRecord:
    """Everything that the store says of one dispatch."""

    dispatch: Dispatch
    state: DispatchState
    """leased with a step set: trained, and held until a checkpoint."""
    step: PolicyVersion | None
    """The policy that the step which trained it produced."""
    reason: str | None
    """A `RejectReason` or `FailReason`, for those that ended in one."""
    detail: str
    has_group: bool


class StoreReader:
    """Queries over one run's store. Every answer is a consistent moment of its own."""

    def __init__(self, connection: sqlite3.Connection, segments: SegmentReader) -> None:
        self._connection = connection
        self._segments = segments

    def dispatch_of_trajectory(self, trajectory_id: str) -> str | None:
        """Id of the dispatch whose group holds the trajectory; None if no finished group does."""
        rows = self._all(
            "SELECT d.dispatch_id FROM groups g JOIN dispatches d USING (sequence) WHERE instr(g.header, ?)",
            (f"[{compact_json(trajectory_id)},",),
        )
        return rows[0][0] if rows else None

    def dispatch_record(self, dispatch_id: str) -> DispatchRecord | None:
        """Prompt, policy, attempt and outcome of a dispatch; None if it was never recorded."""
        has = "sequence IN (SELECT sequence FROM groups)"
        sql = (
            f"SELECT state, step_epoch, step_version, reason, detail, {has}, {DISPATCH_COLUMNS} FROM dispatches WHERE "
            "dispatch_id = ?"
        )
        for state, epoch, version, reason, detail, has_group, *columns in self._all(sql, (dispatch_id,)):
            return DispatchRecord(
                dispatch=dispatch_of(tuple(columns)),
                state=DispatchState(state),
                step=None if version is None else PolicyVersion(epoch, version),
                reason=reason,
                detail=detail,
                has_group=bool(has_group),
            )
        return None

    def read_group(self, dispatch_id: str) -> TrajectoryGroup | None:
        """The group, whatever has become of it; None if none was put.

        Raises:
            StoreError: its bytes are missing or damaged.
        """
        sql = (
            "SELECT segment, offset, num_bytes, checksum FROM groups JOIN dispatches USING (sequence) WHERE "
            "dispatch_id = ?"
        )
        rows = self._all(sql, (dispatch_id,))
        return decode(self._segments.read(SegmentPlace(*rows[0]))) if rows else None

    def events(self, dispatch_id: str) -> tuple[dict[str, Any], ...]:
        """The life of a dispatch: its events in order, each with `number`, `at_s`, `kind` and what that kind adds."""
        return tuple(
            json.loads(line)
            for (line,) in self._all("SELECT line FROM events WHERE dispatch_id = ? ORDER BY number", (dispatch_id,))
        )

    def annotations(self, group_id: str) -> tuple[Annotation, ...]:
        """What later rooms found about a group, oldest first."""
        sql = (
            "SELECT kind, payload FROM annotations JOIN dispatches USING (sequence) WHERE dispatch_id = ? ORDER BY "
            "number"
        )
        return tuple(
            Annotation(dispatch_id=group_id, kind=kind, payload=payload)
            for kind, payload in self._all(sql, (group_id,))
        )

    def counts(self) -> Counts:
        with store_errors("reading the store"):
            return Tally(count_slots(self._connection)).counts()

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """The committed versions of the lineage, in order."""
        return tuple(ledger_entry(*row) for row in self._all(LEDGER))

    def commits(self) -> tuple[StepCommit, ...]:
        """The commit records of the lineage, in order: what was trained, and in which step."""
        sql = (
            "SELECT epoch, version, dispatch_ids, trained, masked, dropped FROM commits WHERE lineage ORDER BY version"
        )
        return tuple(
            StepCommit(
                policy=PolicyVersion(epoch, version),
                dispatch_ids=tuple(json.loads(dispatch_ids)),
                trajectories_trained=trained,
                trajectories_masked=masked,
                trajectories_dropped=dropped,
            )
            for epoch, version, dispatch_ids, trained, masked, dropped in self._all(sql)
        )

    def close(self) -> None:
        self._segments.close()
        self._connection.close()

    def _all(self, sql: str, values: Sequence[str] = ()) -> list[Any]:
        with store_errors("reading the store"):
            return self._connection.execute(sql, values).fetchall()


def open_reader(run_dir: Path) -> StoreReader:
    """A reader of the run in `run_dir`; close it after use.

    Raises:
        StoreError: there is no store, or another version of Concord made it.
    """
    return StoreReader(open_for_reading(run_dir / FILE_NAME), SegmentReader(run_dir / DIRECTORY))
