"""The numbered events and their export `events.jsonl`. It knows numbers and lines; what an event means is said where it
is written.

An event is a row of the transaction that it tells of, so it exists exactly when the transition does. The export is
appended after the commit: it may lag, it never runs ahead and never loses; after a crash a line may come twice, with
the same number.
"""

import json
import logging
import os
import sqlite3
from enum import StrEnum
from pathlib import Path

from rollout.store.sqlite.segments import write_all

FILE_NAME = "events.jsonl"
_log = logging.getLogger(__name__)


class EventKind(StrEnum):
    """Events that the store writes of its own. Run events (`record_event`) choose other names."""

    EPOCH_OPENED = "epoch_opened"
    """A trainer start; older epochs are fenced from here on."""
    DISPATCHED = "dispatched"
    """An attempt is recorded; no engine has seen its prompt yet."""
    READY = "ready"
    """The group is durable."""
    PUT_REFUSED = "put_refused"
    """A group came for a dispatch that had ended, or came twice."""
    ANNOTATED = "annotated"
    """A later room left its bytes with the group."""
    AUDITED = "audited"
    """Annotated with a verdict while ready."""
    LEASED = "leased"
    """The trainer has the group."""
    STEP_COMMITTED = "step_committed"
    """The commit record of a step, in full."""
    TRAINED = "trained"
    """In a step that no checkpoint holds yet."""
    SETTLED = "settled"
    """A checkpoint holds the step: trained for good."""
    REJECTED = "rejected"
    """Ended with a group that is not trained on, for the reason given."""
    FAILED = "failed"
    """Ended without a group, for the reason given."""
    ENDING_LEFT_OUT = "ending_left_out"
    """An ending came for a dispatch that had ended."""
    VERSION_COMMITTED = "version_committed"
    """Healthy engines confirmed the version; it is in the ledger."""
    VERSION_ORPHANED = "version_orphaned"
    """A resume took the version out of the lineage."""
    STEP_TAKEN_BACK = "step_taken_back"
    """A resume took the step's commit record out of the lineage."""
    RETURNED = "returned"
    """A leased or trained group can be leased again after a resume."""
    TRAINED_OUTSIDE_LINEAGE = "trained_outside_lineage"
    """A resume from an older checkpoint left a settled step behind: the dispatch stays trained, its prompt comes
    again."""


class Journal:
    """Writer of `events.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.exported, self._size = _last_whole_line(self._file)
        """Number of the newest event in the file; 0 when there is none."""
        if os.fstat(self._file).st_size > self._size:
            os.ftruncate(self._file, self._size)
        self._lagging = True

    def export(self, connection: sqlite3.Connection, lines: list[tuple[int, str]]) -> None:
        """Append events that have just committed; if earlier ones could not be written, those first (from the table).

        A disk that refuses does not undo the transition: the export lags, is said to, and is caught up with by a later
        call.
        """
        if self._lagging:
            lines = connection.execute(
                "SELECT number, line FROM events WHERE number > ? ORDER BY number", (self.exported,)
            ).fetchall()
        if not lines:
            self._lagging = False
            return
        data = "".join(f"{line}\n" for _, line in lines).encode()
        try:
            write_all(self._file, [memoryview(data)])
        except OSError as error:
            if not self._lagging:
                lag = (self._path, lines[0][0], error)
                _log.warning("%s lags behind the store from event %d on: %s; it will be caught up with", *lag)
            self._lagging = True
            if os.fstat(self._file).st_size > self._size:
                os.ftruncate(self._file, self._size)
            return
        self._lagging = False
        self._size += len(data)
        self.exported = lines[-1][0]

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _last_whole_line(file: int) -> tuple[int, int]:
    """(number of the last event that is whole, offset behind its line). A crash may leave half a line, or zeros, behind
    it."""
    end = os.fstat(file).st_size
    block = 1 << 16
    while end > 0:
        start = max(0, end - block)
        data = os.pread(file, end - start, start)
        head = data.rfind(b"\n", 0, -1) + 1
        if head == 0 and start > 0:
            block *= 2
            continue
        number = _number(data[head:])
        if number is not None:
            return number, end
        end = start + head
    return 0, 0


def _number(line: bytes) -> int | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return int(json.loads(line)["number"])
    except ValueError:
        return None
