"""The tables of `store.sqlite`, and how the file is opened. It knows SQLite and durability, and no transition."""

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rollout.errors import StoreError, StoreVersionError

FILE_NAME = "store.sqlite"
SCHEMA_VERSION = 1
Durability = Literal["process", "machine"]

_TABLES = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE epochs(epoch INTEGER PRIMARY KEY, resumed_version INTEGER NOT NULL, opened_at_s REAL NOT NULL);
CREATE TABLE dispatches(
    sequence INTEGER PRIMARY KEY,
    dispatch_id TEXT NOT NULL UNIQUE,
    prompt_id TEXT NOT NULL, pass_index INTEGER NOT NULL, prompt TEXT NOT NULL,
    group_size INTEGER NOT NULL, attempt INTEGER NOT NULL,
    epoch INTEGER NOT NULL, version INTEGER NOT NULL, replica INTEGER NOT NULL, created_at_s REAL NOT NULL,
    state TEXT NOT NULL, step_epoch INTEGER, step_version INTEGER, reason TEXT, detail TEXT NOT NULL DEFAULT ''
);
CREATE TABLE groups(
    sequence INTEGER PRIMARY KEY REFERENCES dispatches,
    header TEXT NOT NULL,
    segment INTEGER NOT NULL, offset INTEGER NOT NULL, num_bytes INTEGER NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE readmissions(sequence INTEGER PRIMARY KEY REFERENCES dispatches, prompt_id TEXT NOT NULL,
    pass_index INTEGER NOT NULL, attempt INTEGER NOT NULL);
CREATE INDEX readmissions_by_prompt ON readmissions(prompt_id, pass_index);
-- commits.digest is always empty; it stands so that every store of this schema has the same columns.
CREATE TABLE commits(
    epoch INTEGER NOT NULL, version INTEGER NOT NULL, dispatch_ids TEXT NOT NULL, digest TEXT NOT NULL,
    trained INTEGER NOT NULL, masked INTEGER NOT NULL, dropped INTEGER NOT NULL,
    lineage INTEGER NOT NULL DEFAULT 1, settled INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY(epoch, version)
) WITHOUT ROWID;
CREATE TABLE ledger(
    epoch INTEGER NOT NULL, version INTEGER NOT NULL, digest TEXT NOT NULL, lineage INTEGER NOT NULL DEFAULT 1,
    PRIMARY KEY(epoch, version)
) WITHOUT ROWID;
CREATE TABLE annotations(number INTEGER PRIMARY KEY, sequence INTEGER NOT NULL REFERENCES dispatches,
    kind TEXT NOT NULL, payload BLOB NOT NULL);
CREATE INDEX annotations_by_group ON annotations(sequence);
CREATE TABLE events(number INTEGER PRIMARY KEY, dispatch_id TEXT, line TEXT NOT NULL);
CREATE INDEX events_by_dispatch ON events(dispatch_id) WHERE dispatch_id IS NOT NULL;
INSERT INTO meta(key, value) VALUES ('schema', 1), ('epoch', 0), ('cursor_pass', 0), ('cursor_index', 0);
"""

_CURES = {
    "SQLITE_FULL": "the disk is full: free some space and go on; nothing that was acknowledged is lost",
    "SQLITE_READONLY": "the run directory is read-only: make it writable, or run elsewhere",
    "SQLITE_CANTOPEN": "the run directory is missing or not writable: create it, or run elsewhere",
    "SQLITE_BUSY": "another process is writing to this run: end it first",
    "SQLITE_NOTADB": "the file is not a store: restore it, or start a new run",
    "SQLITE_CORRUPT": "the file is damaged: restore it from a copy, or start a new run",
    "SQLITE_IOERR": (
        "the disk refused: see to its space and health, then resume the run; nothing that was acknowledged is lost"
    ),
}


@contextmanager
def store_errors(context: str) -> Generator[None]:
    """Turn what SQLite and the operating system raise into StoreErrors that name the cure."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        cure = next(
            (cure for prefix, cure in _CURES.items() if name.startswith(prefix)), "see to the disk, then resume the run"
        )
        raise StoreError(f"{context}: {error} ({name or type(error).__name__}); {cure}") from error
    except OSError as error:
        raise StoreError(
            f"{context}: {error}; see to the disk's space and the permissions of the run directory; nothing that was "
            "acknowledged is lost"
        ) from error


def open_for_writing(path: Path, durability: Durability) -> sqlite3.Connection:
    """The database at `path`, made if it is missing, in autocommit mode: transactions are explicit.

    Raises:
        StoreError: it cannot be opened or written, or another version of Concord made it.
    """
    with store_errors(f"opening {path}"):
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={'FULL' if durability == 'machine' else 'NORMAL'}")
        # Rarer checkpoints of the log: each costs two fsyncs, also in `process` durability.
        connection.execute("PRAGMA wal_autocheckpoint=4000")
        connection.execute("BEGIN IMMEDIATE")
        if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            for statement in _TABLES.split(";\n"):
                connection.execute(statement)
        connection.execute("COMMIT")
        _check_schema(connection, path)
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only look at the database of a running or finished run.

    Raises:
        StoreError: there is none, or another version of Concord made it.
    """
    if not path.exists():
        raise StoreError(f"no store at {path}; give the directory of a run")
    with store_errors(f"opening {path} for reading"):
        log = path.with_name(f"{path.name}-wal")
        # In a directory that cannot be written, a closed database has no log and none can be made: nobody writes, so it
        # is read as it is.
        settled = not os.access(path.parent, os.W_OK) and not log.exists()
        address = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if settled else ''}"
        connection = sqlite3.connect(address, uri=True, isolation_level=None, timeout=5.0)
        _check_schema(connection, path)
    return connection


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    found = connection.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()[0]
    if found != SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path} has schema {found}; this version of Concord reads {SCHEMA_VERSION}: open the run with the version "
            "that wrote it"
        )
