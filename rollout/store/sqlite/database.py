"""Transactions: a change, its events and its counts become durable and visible together, or not at all. It knows no
particular transition."""

import sqlite3
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rollout.errors import FencedError, StoreError
from rollout.store.sqlite.journal import FILE_NAME as EVENTS_FILE
from rollout.store.sqlite.journal import EventKind, Journal
from rollout.store.sqlite.records import quoted
from rollout.store.sqlite.schema import FILE_NAME, Durability, open_for_writing, store_errors
from rollout.store.sqlite.tally import Slot, Tally, count_slots
from rollout.types.codec import compact_json
from rollout.types.dispatch import Counts, DispatchState


class DispatchRow(NamedTuple):
    """What a transition needs to know of a dispatch."""

    sequence: int
    dispatch_id: str
    state: DispatchState
    step_version: int | None
    reason: str | None
    prompt_id: str
    pass_index: int
    attempt: int

    @property
    def slot(self) -> Slot:
        held = self.state is DispatchState.LEASED
        return Slot(self.state, self.step_version if held else None, self.reason)

    @property
    def trained(self) -> bool:
        """A commit record names it, whether or not a checkpoint holds the step."""
        return self.state is DispatchState.TRAINED or self.step_version is not None


RESERVED_FIELDS = frozenset({"number", "at_s", "kind"})
"""What every event has of its own."""
_STATES = {state.value: state for state in DispatchState}
_ROW_COLUMNS = "sequence, dispatch_id, state, step_version, reason, prompt_id, pass_index, attempt"


class Transaction:
    """One change in the making."""

    def __init__(self, connection: sqlite3.Connection, first_number: int, now_s: float) -> None:
        self.connection = connection
        self.now_s = now_s
        self.events: list[tuple[int, str | None, str]] = []
        self.moves: list[tuple[Slot | None, Slot]] = []
        """What to count in another slot than before (None: a new dispatch), once this transaction has committed."""
        self._next_number = first_number

    def event(self, kind: str, /, **fields: object) -> None:
        """Write a numbered event of the run with this transaction."""
        self._add(None, f'"kind":{quoted(kind)}{_rest(fields)}')

    def event_of(self, dispatch_ids: Iterable[str], kind: EventKind, /, **fields: object) -> None:
        """Write a numbered event for each of these dispatches, alike in kind and fields."""
        rest = _rest(fields)
        for dispatch_id in dispatch_ids:
            self._add(dispatch_id, f'"kind":"{kind}","dispatch_id":{quoted(dispatch_id)}{rest}')

    def _add(self, dispatch_id: str | None, fields: str) -> None:
        self.events.append(
            (self._next_number, dispatch_id, f'{{"number":{self._next_number},"at_s":{self.now_s!r},{fields}')
        )
        self._next_number += 1

    def rows(self, dispatch_ids: Iterable[str]) -> dict[str, DispatchRow]:
        """The rows of those ids that exist."""
        return {row.dispatch_id: row for row in self._rows("dispatch_id", dispatch_ids)}

    def rows_in(self, *states: DispatchState) -> list[DispatchRow]:
        """All dispatches in these states, in order of dispatch."""
        return sorted(self._rows("state", states))

    def _rows(self, column: str, values: Iterable[str]) -> Iterator[DispatchRow]:
        for sequence, dispatch_id, state, *rest in self.among(f"SELECT {_ROW_COLUMNS} FROM dispatches", column, values):
            yield DispatchRow(sequence, dispatch_id, _STATES[state], *rest)

    def require(self, dispatch_ids: Sequence[str], doing: str) -> list[DispatchRow]:
        """The rows of these ids, in their order.

        Raises:
            StoreError: one does not exist.
        """
        found = self.rows(dispatch_ids)
        for dispatch_id in dispatch_ids:
            if dispatch_id not in found:
                raise StoreError(f"{doing}: the store has no dispatch {dispatch_id}; record it with `dispatch` first")
        return [found[dispatch_id] for dispatch_id in dispatch_ids]

    def among(self, select: str, column: str, values: Iterable[object], order: str = "") -> sqlite3.Cursor:
        """What `select` finds where `column` is one of `values`."""
        sql = f"{select} WHERE {column} IN (SELECT value FROM json_each(?)) {order}"
        return self.connection.execute(sql, (compact_json(list(values)),))

    def by_sequence(self, rows: Iterable[DispatchRow], select: str, order: str = "") -> dict[int, Any]:
        """What `select` finds for `rows`: its first column, a row's sequence, -> the others."""
        found = self.among(select, "sequence", (row.sequence for row in rows), order)
        return {sequence: values for sequence, *values in found}

    def move(self, rows: Sequence[DispatchRow], state: DispatchState) -> None:
        """Bring `rows` to a state that needs no further field; a step that they carried is taken off unless they end as
        trained."""
        self.moves += [(row.slot, Slot(state)) for row in rows]
        step = "" if state is DispatchState.TRAINED else ", step_epoch = NULL, step_version = NULL"
        self.connection.executemany(
            f"UPDATE dispatches SET state = ?{step} WHERE sequence = ?", [(state, row.sequence) for row in rows]
        )


class Database:
    """The open store of one run: connection, counts in memory, epoch and journal."""

    def __init__(self, run_dir: Path, durability: Durability, clock: Callable[[], float] = time.time) -> None:
        self.path = run_dir / FILE_NAME
        self._clock = clock
        self.connection = open_for_writing(self.path, durability)
        with store_errors(f"opening {run_dir / EVENTS_FILE}"):
            self._journal = Journal(run_dir / EVENTS_FILE)
            self.epoch = self._stored_epoch()
            self._tally = Tally(count_slots(self.connection))
            self._journal.export(self.connection, [])

    @contextmanager
    def transaction(self, doing: str, epoch: int | None = None) -> Generator[Transaction]:
        """Run the body as one transaction, of the caller's trainer epoch where the call carries one.

        Raises:
            FencedError: `epoch` is not the current one, or another process has opened a newer epoch on this store.
            StoreError: the disk refused; nothing has changed.
        """
        if epoch is not None and epoch != self.epoch:
            raise FencedError(
                f"{doing}: got trainer epoch {epoch}, the store is at {self.epoch}: only the newest trainer may change "
                "the run"
            )
        with store_errors(doing):
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                if (stored := self._stored_epoch()) != self.epoch:
                    raise FencedError(
                        f"{doing}: another process has opened trainer epoch {stored} on this store, which was at "
                        f"{self.epoch}: only the newest may change the run"
                    )
                # The export may know more events than a database that lost power.
                newest = self.connection.execute("SELECT max(number) FROM events").fetchone()[0] or 0
                work = Transaction(self.connection, max(newest, self._journal.exported) + 1, self._clock())
                yield work
                self.connection.executemany(
                    "INSERT INTO events(number, dispatch_id, line) VALUES (?, ?, ?)", work.events
                )
                self.connection.execute("COMMIT")
            except BaseException:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise
        for old, new in work.moves:
            self._tally.move(old, new)
        self._journal.export(self.connection, [(number, line) for number, _, line in work.events])

    def open_epoch(self, work: Transaction, resumed_version: int) -> int:
        """Begin the next trainer epoch within `work`; `adopt` it once that has committed."""
        epoch = self.epoch + 1
        work.connection.execute("UPDATE meta SET value = ? WHERE key = 'epoch'", (epoch,))
        work.connection.execute(
            "INSERT INTO epochs(epoch, resumed_version, opened_at_s) VALUES (?, ?, ?)",
            (epoch, resumed_version, work.now_s),
        )
        work.event(EventKind.EPOCH_OPENED, trainer_epoch=epoch, resumed_version=resumed_version)
        return epoch

    def adopt(self) -> None:
        """Take epoch and counts from the tables."""
        with store_errors(f"reading {self.path}"):
            self.epoch = self._stored_epoch()
            self._tally = Tally(count_slots(self.connection))

    def counts(self) -> Counts:
        return self._tally.counts()

    def close(self) -> None:
        """Fold the log into the database and close everything."""
        with store_errors(f"closing {self.path}"):
            self._journal.export(self.connection, [])
            self._journal.close()
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self.connection.close()

    def _stored_epoch(self) -> int:
        return self.connection.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()[0]


def _rest(fields: dict[str, object]) -> str:
    """The end of an object that has begun: these fields and the closing brace."""
    return f",{compact_json(fields)[1:]}" if fields else "}"
