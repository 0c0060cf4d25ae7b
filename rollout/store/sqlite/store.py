"""The store of a run: what answers `rollout.types.protocols.Store`, over one run directory. It lives alone in its
process; the work is synchronous and short."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollout.errors import StoreError
from rollout.store.sqlite import arrivals, recovery, transitions
from rollout.store.sqlite.database import RESERVED_FIELDS, Database, DispatchRow, Transaction
from rollout.store.sqlite.filesystem import refuse_network_file_system
from rollout.store.sqlite.schema import Durability
from rollout.store.sqlite.segments import DIRECTORY, SEGMENT_BYTES, SegmentReader, SegmentWriter
from rollout.types.dispatch import Counts, Dispatch, Ending, LedgerEntry, Readmitted, StepCommit
from rollout.types.prompts import PromptCursor
from rollout.types.protocols import EventFields, Recovery
from rollout.types.trajectory import Annotation, EncodedGroup, StoredGroups
from rollout.types.weights import PolicyVersion


class SqliteStore:
    """Answers the calls of `Store`, from `run_dir/store.sqlite` and `run_dir/tokens/`.

    Args:
        run_dir: an existing directory on a local disk.
        durability: `process` survives kill -9; `machine` also survives power loss, at one or two syncs a call.
        segment_bytes: size at which a file of encoded groups is closed.

    Raises:
        StoreError: the directory is missing, read-only, on a network file system, or holds a store of another version.
    """

    def __init__(self, run_dir: Path, durability: Durability = "process", segment_bytes: int = SEGMENT_BYTES) -> None:
        if not run_dir.is_dir():
            raise StoreError(f"there is no run directory {run_dir}; create it first")
        refuse_network_file_system(run_dir)
        self._database = Database(run_dir, durability)
        self._writer = SegmentWriter(run_dir / DIRECTORY, durability, segment_bytes)
        self._reader = SegmentReader(run_dir / DIRECTORY)

    def recover(self, checkpoint: PolicyVersion | None) -> Recovery:
        return recovery.recover(self._database, checkpoint)

    def dispatch(self, trainer_epoch: int, dispatches: Sequence[Dispatch], cursor: PromptCursor) -> Counts:
        with self._database.transaction("dispatch", trainer_epoch) as work:
            transitions.record_dispatches(work, dispatches, cursor)
        return self._database.counts()

    def put(self, groups: Sequence[EncodedGroup]) -> tuple[str, ...]:
        try:
            with self._database.transaction("put") as work:
                taken = arrivals.put(work, groups, self._writer, self._database.epoch)
            self._writer.keep()
        finally:
            self._writer.take_back()
        return taken

    def annotate(self, annotations: Sequence[Annotation]) -> None:
        with self._database.transaction("annotate") as work:
            transitions.annotate(work, annotations)

    def fetch(self, dispatch_ids: Sequence[str]) -> StoredGroups:
        with self._database.transaction("fetch") as work:
            rows = transitions.with_groups(work, dispatch_ids)
            return replace(self._groups(work, rows), prompts=transitions.prompts(work, rows))

    def lease(self, trainer_epoch: int, dispatch_ids: Sequence[str]) -> StoredGroups:
        with self._database.transaction("lease", trainer_epoch) as work:
            return self._groups(work, transitions.lease(work, dispatch_ids))

    def _groups(self, work: Transaction, rows: Sequence[DispatchRow]) -> StoredGroups:
        return StoredGroups(
            dispatch_ids=tuple(row.dispatch_id for row in rows),
            payloads=arrivals.payloads(work, rows, self._reader),
            verdicts=transitions.verdicts(work, rows),
        )

    def acknowledge(self, commit: StepCommit) -> Counts:
        with self._database.transaction("acknowledge", commit.policy.trainer_epoch) as work:
            transitions.acknowledge(work, commit)
        return self._database.counts()

    def settle(self, checkpoint: PolicyVersion) -> Counts:
        with self._database.transaction("settle") as work:
            recovery.refuse_foreign_checkpoint(work, checkpoint, self._database.epoch)
            transitions.settle(work, checkpoint.version)
        return self._database.counts()

    def reject(self, trainer_epoch: int, endings: Sequence[Ending]) -> Readmitted:
        with self._database.transaction("reject", trainer_epoch) as work:
            readmissions = transitions.end(work, endings)
        return Readmitted(counts=self._database.counts(), readmissions=tuple(readmissions))

    def commit_version(self, entry: LedgerEntry) -> Counts:
        with self._database.transaction("commit version", entry.policy.trainer_epoch) as work:
            transitions.commit_version(work, entry)
        return self._database.counts()

    def record_event(self, kind: str, fields: EventFields) -> None:
        reserved = sorted(RESERVED_FIELDS & fields.keys())
        if reserved:
            raise StoreError(
                f"record event {kind}: fields {', '.join(reserved)} are written by the store; name them otherwise"
            )
        with self._database.transaction("record event") as work:
            work.event(kind, **fields)

    def counts(self) -> Counts:
        return self._database.counts()

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
        self._database.close()
