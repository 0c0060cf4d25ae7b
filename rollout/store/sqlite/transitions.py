"""Each change of state, as what it does within one transaction. It knows the tables; `database` makes it durable,
`store` offers it to callers.

    dispatched -> ready -> (audited ->) leased -> leased with a step -> trained

and to rejected or failed from anywhere before the step.
"""

import json
from collections import Counter
from collections.abc import Sequence

from rollout.errors import StoreError
from rollout.store.sqlite.database import DispatchRow, Transaction
from rollout.store.sqlite.journal import EventKind
from rollout.store.sqlite.records import DISPATCH_COLUMNS, dispatch_columns, prompt_of
from rollout.store.sqlite.tally import Slot
from rollout.types.codec import compact_json
from rollout.types.dispatch import Dispatch, DispatchState, Ending, FailReason, LedgerEntry, Readmission, StepCommit
from rollout.types.prompts import Prompt, PromptCursor
from rollout.types.trajectory import Annotation
from rollout.types.weights import PolicyVersion

VERDICT = "verdict"
"""The kind of annotation that moves a ready group to audited."""
_WAITING = (DispatchState.READY, DispatchState.AUDITED)
"""States in which a group can be leased."""


def record_dispatches(work: Transaction, dispatches: Sequence[Dispatch], cursor: PromptCursor) -> None:
    """Record new attempts, take their prompts out of the re-admission queue, and move the cursor."""
    duplicates = sorted(work.rows([d.dispatch_id for d in dispatches])) + [
        i for i, n in Counter(d.dispatch_id for d in dispatches).items() if n > 1
    ]
    if duplicates:
        raise StoreError(
            f"dispatch: {', '.join(duplicates)} already recorded; every attempt needs an id of its own "
            "(`Recovery.next_dispatch` numbers on)"
        )
    _move_cursor(work, cursor)
    first = work.connection.execute("SELECT count(*) FROM dispatches").fetchone()[0]
    work.connection.executemany(
        f"INSERT INTO dispatches(sequence, prompt_id, pass_index, state, {DISPATCH_COLUMNS}) VALUES (?, ?, ?, "
        "'dispatched', ?, ?, ?, ?, ?, ?, ?, ?)",
        [(first + i, d.prompt.prompt_id, d.prompt.pass_index, *dispatch_columns(d)) for i, d in enumerate(dispatches)],
    )
    work.connection.executemany(
        "DELETE FROM readmissions WHERE sequence = (SELECT min(sequence) FROM readmissions WHERE prompt_id = ? AND "
        "pass_index = ?)",
        [(d.prompt.prompt_id, d.prompt.pass_index) for d in dispatches],
    )
    for d in dispatches:
        named = {
            "prompt_id": d.prompt.prompt_id,
            "pass_index": d.prompt.pass_index,
            "attempt": d.attempt,
            "policy": d.policy.key,
            "replica": d.replica,
        }
        work.event_of([d.dispatch_id], EventKind.DISPATCHED, **named)
    work.moves.extend([(None, Slot(DispatchState.DISPATCHED))] * len(dispatches))


def _move_cursor(work: Transaction, cursor: PromptCursor) -> None:
    stored = read_cursor(work)
    if (cursor.pass_index, cursor.index) < (stored.pass_index, stored.index):
        raise StoreError(
            f"dispatch: the prompt cursor would go back from {stored} to {cursor}, and prompts would come twice; "
            "continue from `Recovery.cursor`"
        )
    work.connection.executemany(
        "UPDATE meta SET value = ? WHERE key = ?", [(cursor.pass_index, "cursor_pass"), (cursor.index, "cursor_index")]
    )


def read_cursor(work: Transaction) -> PromptCursor:
    """The stored prompt cursor."""
    stored: dict[str, int] = dict(work.connection.execute("SELECT key, value FROM meta"))
    return PromptCursor(pass_index=stored["cursor_pass"], index=stored["cursor_index"])


def annotate(work: Transaction, annotations: Sequence[Annotation]) -> None:
    """Keep typed bytes with groups; a verdict moves a ready group to audited, and one in another state nowhere."""
    rows = work.require([annotation.dispatch_id for annotation in annotations], "annotate")
    with_group = work.by_sequence(rows, "SELECT sequence FROM groups")
    audited: dict[str, DispatchRow] = {}
    for annotation, row in zip(annotations, rows, strict=True):
        if row.sequence not in with_group:
            raise StoreError(
                f"annotate: dispatch {row.dispatch_id} is {row.state} and has no group yet; annotate groups after `put`"
            )
        sql = "INSERT INTO annotations(sequence, kind, payload) VALUES (?, ?, ?)"
        work.connection.execute(sql, (row.sequence, annotation.kind, annotation.payload))
        work.event_of([row.dispatch_id], EventKind.ANNOTATED, annotation=annotation.kind, bytes=len(annotation.payload))
        if annotation.kind == VERDICT and row.state is DispatchState.READY:
            audited[row.dispatch_id] = row
    work.move(list(audited.values()), DispatchState.AUDITED)
    work.event_of(list(audited), EventKind.AUDITED)


def with_groups(work: Transaction, dispatch_ids: Sequence[str]) -> list[DispatchRow]:
    """The rows of those of `dispatch_ids` that have a group and have not ended, in the order asked."""
    found = work.rows(dispatch_ids)
    held = (*_WAITING, DispatchState.LEASED)
    return [row for i in dispatch_ids if (row := found.get(i)) is not None and row.state in held]


def prompts(work: Transaction, rows: Sequence[DispatchRow]) -> tuple[Prompt, ...]:
    """What each row was asked."""
    texts = work.by_sequence(rows, "SELECT sequence, prompt FROM dispatches")
    return tuple(prompt_of(*texts[row.sequence]) for row in rows)


def verdicts(work: Transaction, rows: Sequence[DispatchRow]) -> tuple[bytes, ...]:
    """The newest verdict annotation of each row, empty where there is none."""
    select, order = "SELECT sequence, payload FROM annotations", f"AND kind = '{VERDICT}' ORDER BY number"
    newest = work.by_sequence(rows, select, order)
    return tuple(newest[row.sequence][0] if row.sequence in newest else b"" for row in rows)


def lease(work: Transaction, dispatch_ids: Sequence[str]) -> list[DispatchRow]:
    """ready or audited -> leased, all or none; the rows in the order asked."""
    rows = work.require(dispatch_ids, "lease")
    wrong = [f"{row.dispatch_id} ({row.state})" for row in rows if row.state not in _WAITING]
    wrong += _repeated(dispatch_ids, "asked")
    if wrong:
        raise StoreError(
            f"lease: {', '.join(wrong)} cannot be leased; expected ready or audited groups, each once. None of the "
            f"{len(rows)} was leased"
        )
    work.move(rows, DispatchState.LEASED)
    work.event_of(dispatch_ids, EventKind.LEASED)
    return rows


def _repeated(dispatch_ids: Sequence[str], how: str) -> list[str]:
    return [f"{i} ({how} {n} times)" for i, n in Counter(dispatch_ids).items() if n > 1]


def acknowledge(work: Transaction, commit: StepCommit) -> None:
    """Write the commit record of a step; the groups that it names are trained, and held until a checkpoint."""
    epoch, version = commit.policy.trainer_epoch, commit.policy.version
    totals = {
        "trained": commit.trajectories_trained,
        "masked": commit.trajectories_masked,
        "dropped": commit.trajectories_dropped,
    }
    record = (compact_json(commit.dispatch_ids), *totals.values())
    doing = f"acknowledge step {commit.policy.key}"
    sql = "SELECT dispatch_ids, trained, masked, dropped FROM commits WHERE epoch = ? AND version = ?"
    stored = work.connection.execute(sql, (epoch, version)).fetchone()
    if stored == record:
        return
    if stored is not None:
        raise StoreError(
            f"{doing}: another commit record of this step is stored: {stored}, got {record}; a step is committed once"
        )
    newest = work.connection.execute("SELECT max(version) FROM commits WHERE lineage").fetchone()[0] or 0
    if version <= newest:
        raise StoreError(f"{doing}: step {newest} is already committed; expected a newer step")
    rows = _leased_rows(work, commit.dispatch_ids, doing)
    columns = "epoch, version, dispatch_ids, trained, masked, dropped, digest"
    work.connection.execute(f"INSERT INTO commits({columns}) VALUES (?, ?, ?, ?, ?, ?, '')", (epoch, version, *record))
    work.connection.executemany(
        "UPDATE dispatches SET step_epoch = ?, step_version = ? WHERE sequence = ?",
        [(epoch, version, row.sequence) for row in rows],
    )
    work.event(EventKind.STEP_COMMITTED, policy=commit.policy.key, dispatch_ids=commit.dispatch_ids, **totals)
    work.event_of(commit.dispatch_ids, EventKind.TRAINED, step=commit.policy.key)
    work.moves.extend((row.slot, Slot(DispatchState.LEASED, version)) for row in rows)


def _leased_rows(work: Transaction, dispatch_ids: Sequence[str], doing: str) -> list[DispatchRow]:
    rows = work.require(dispatch_ids, doing)
    wrong = [
        f"{row.dispatch_id} ({'trained' if row.trained else row.state})"
        for row in rows
        if row.slot != Slot(DispatchState.LEASED)
    ]
    wrong += _repeated(dispatch_ids, "named")
    if wrong:
        raise StoreError(
            f"{doing}: {', '.join(wrong)}; expected leased groups that no step has trained, each once. Nothing was "
            "committed"
        )
    return rows


def settle(work: Transaction, version: int) -> None:
    """A checkpoint holds all steps up to `version`: their groups are terminal."""
    held = work.connection.execute(
        "SELECT epoch, version, dispatch_ids FROM commits WHERE lineage AND NOT settled AND version <= ?", (version,)
    ).fetchall()
    for epoch, step, dispatch_ids in held:
        rows = work.rows(json.loads(dispatch_ids))
        work.move(list(rows.values()), DispatchState.TRAINED)
        work.connection.execute("UPDATE commits SET settled = 1 WHERE epoch = ? AND version = ?", (epoch, step))
        work.event_of(rows, EventKind.SETTLED, step=PolicyVersion(epoch, step).key)


def end(work: Transaction, endings: Sequence[Ending]) -> list[Readmission]:
    """End dispatches that were not trained; those that have ended (or were trained) are left out with an event."""
    found = {row.dispatch_id: row for row in work.require([ending.dispatch_id for ending in endings], "reject")}
    readmissions: list[Readmission] = []
    for ending in endings:
        row = found[ending.dispatch_id]
        if row.trained or row.reason is not None:
            said = {"state": row.state, "reason": ending.reason, "detail": ending.detail}
            work.event_of([row.dispatch_id], EventKind.ENDING_LEFT_OUT, **said)
            continue
        sql = "UPDATE dispatches SET state = ?, reason = ?, detail = ? WHERE sequence = ?"
        work.connection.execute(sql, (ending.state, ending.reason, ending.detail, row.sequence))
        work.moves.append((row.slot, Slot(ending.state, None, ending.reason.value)))
        kind = EventKind.REJECTED if ending.state is DispatchState.REJECTED else EventKind.FAILED
        work.event_of([row.dispatch_id], kind, reason=ending.reason, detail=ending.detail, readmitted=ending.readmit)
        found[row.dispatch_id] = row._replace(state=ending.state, reason=ending.reason)
        if ending.readmit:
            # A failure of its own counts against a prompt; a rejection, or a process that went away, does not.
            counted = ending.state is DispatchState.FAILED and ending.reason is not FailReason.LOST
            readmissions.append(readmit(work, row, row.attempt + counted))
    return readmissions


def readmit(work: Transaction, row: DispatchRow, attempt: int) -> Readmission:
    """Queue the prompt of an ended dispatch. The queue is in order of the dispatches that ended, whatever order they
    ended in."""
    work.connection.execute(
        "INSERT INTO readmissions(sequence, prompt_id, pass_index, attempt) VALUES (?, ?, ?, ?)",
        (row.sequence, row.prompt_id, row.pass_index, attempt),
    )
    return Readmission(prompt=prompts(work, [row])[0], attempt=attempt)


def commit_version(work: Transaction, entry: LedgerEntry) -> None:
    """Add a version to the ledger; it must be newer than this epoch's newest and not behind the lineage's."""
    epoch, version = entry.policy.trainer_epoch, entry.policy.version
    newest = work.connection.execute(
        "SELECT max(version) FROM ledger WHERE lineage AND epoch = ?", (epoch,)
    ).fetchone()[0]
    if newest is not None and version <= newest:
        raise StoreError(
            f"commit version {entry.policy.key}: the ledger's newest of this epoch is {newest}; versions only go up"
        )
    lineage = work.connection.execute("SELECT max(version) FROM ledger WHERE lineage").fetchone()[0]
    if lineage is not None and version < lineage:
        raise StoreError(
            f"commit version {entry.policy.key}: the lineage is already at version {lineage}; expected that or newer"
        )
    work.connection.execute(
        "INSERT INTO ledger(epoch, version, digest) VALUES (?, ?, ?)", (epoch, version, entry.digest)
    )
    work.event(EventKind.VERSION_COMMITTED, policy=entry.policy.key, digest=entry.digest)
