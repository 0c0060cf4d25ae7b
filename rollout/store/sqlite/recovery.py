"""What a new trainer epoch makes of what older ones left, as one transaction.

A resume at checkpoint c takes versions above c of all older epochs out of the lineage. So a policy (e, v) is in the
lineage if v is at most the version of every resume since epoch e: with epoch 1 up to 10, a resume at 8, epoch 2 up to
12 and a resume at 11, (1, 8) and (2, 11) are in it and (1, 9) is not, although 9 < 11.
"""

import json
from collections.abc import Sequence

from rollout.errors import FencedError, StoreError
from rollout.store.sqlite.arrivals import headers
from rollout.store.sqlite.database import Database, Transaction
from rollout.store.sqlite.journal import EventKind
from rollout.store.sqlite.records import LEDGER, ledger_entry, prompt_of
from rollout.store.sqlite.transitions import VERDICT, end, read_cursor, readmit, settle
from rollout.types.dispatch import DispatchState, Ending, FailReason, Readmission, RejectReason, Totals
from rollout.types.protocols import Recovery
from rollout.types.trajectory import GroupHeader
from rollout.types.weights import PolicyVersion


def recover(database: Database, checkpoint: PolicyVersion | None) -> Recovery:
    """See `Store.recover`."""
    version = 0 if checkpoint is None else checkpoint.version
    database.adopt()
    with database.transaction(f"recover at version {version}") as work:
        if checkpoint is not None:
            _check_lineage(work, checkpoint, database.epoch)
        epoch = database.open_epoch(work, version)
        settle(work, version)
        _take_back_steps(work, version)
        _return_leased(work)
        _drop_versions(work, version)
        _end_lost(work)
        ready = _end_orphans(work, _limits(work))
        ledger = tuple(ledger_entry(*row) for row in work.connection.execute(LEDGER))
        readmissions, cursor, totals = _queue(work), read_cursor(work), _totals(work)
    database.adopt()
    counts = database.counts()
    return Recovery(
        trainer_epoch=epoch,
        cursor=cursor,
        next_dispatch=counts.total,
        ready=ready,
        readmissions=readmissions,
        ledger=ledger,
        counts=counts,
        totals=totals,
    )


def _limits(work: Transaction) -> list[tuple[int, int]]:
    """(epoch, newest version of older epochs that it took over), newest epoch last."""
    return work.connection.execute("SELECT epoch, resumed_version FROM epochs ORDER BY epoch").fetchall()


def _in_lineage(policy: PolicyVersion, limits: Sequence[tuple[int, int]]) -> bool:
    return all(policy.version <= version for epoch, version in limits if epoch > policy.trainer_epoch)


def refuse_foreign_checkpoint(work: Transaction, checkpoint: PolicyVersion, epoch: int) -> None:
    """Fence a trainer that was thought dead and saved a checkpoint after all.

    Raises:
        FencedError: the checkpoint is neither of the current epoch nor in its lineage.
    """
    if checkpoint.trainer_epoch > epoch or not _in_lineage(checkpoint, _limits(work)):
        raise FencedError(
            f"settle: checkpoint {checkpoint.key} is not in the lineage of epoch {epoch}: the trainer that saved it has"
            " been replaced"
        )


def _check_lineage(work: Transaction, checkpoint: PolicyVersion, epoch: int) -> None:
    limits = _limits(work)
    if checkpoint.trainer_epoch > epoch:
        raise StoreError(
            f"recover: got checkpoint {checkpoint.key}, but the store has only seen epoch {epoch}: checkpoint and store"
            " are of different runs"
        )
    if not _in_lineage(checkpoint, limits):
        resumed = ", ".join(f"epoch {e} at version {v}" for e, v in limits if e > checkpoint.trainer_epoch)
        raise StoreError(
            f"recover: checkpoint {checkpoint.key} was taken back by a later resume ({resumed}); resume from a "
            "checkpoint of the newest epoch"
        )


def _take_back_steps(work: Transaction, version: int) -> None:
    """Steps above the checkpoint leave the lineage: held groups can be leased again; of settled ones, the prompts come
    again."""
    steps = work.connection.execute(
        "SELECT epoch, version, dispatch_ids, settled FROM commits WHERE lineage AND version > ? ORDER BY version",
        (version,),
    ).fetchall()
    for epoch, step, dispatch_ids, settled in steps:
        key = PolicyVersion(epoch, step).key
        ids: list[str] = json.loads(dispatch_ids)
        work.event(EventKind.STEP_TAKEN_BACK, policy=key, dispatch_ids=ids)
        if not settled:
            continue
        for row in sorted(work.rows(ids).values()):
            # A dispatch ends once: it stays trained. Its prompt comes again so that the new lineage does not miss it.
            readmit(work, row, row.attempt)
            work.event_of([row.dispatch_id], EventKind.TRAINED_OUTSIDE_LINEAGE, step=key)
    work.connection.execute("UPDATE commits SET lineage = 0 WHERE version > ?", (version,))


def _return_leased(work: Transaction) -> None:
    """Every lease ends with the epoch that took it: back to audited where there is a verdict, else to ready."""
    leased = work.rows_in(DispatchState.LEASED)
    judged = {
        sequence
        for (sequence,) in work.connection.execute(
            "SELECT DISTINCT sequence FROM annotations WHERE kind = ?", (VERDICT,)
        )
    }
    work.move([row for row in leased if row.sequence in judged], DispatchState.AUDITED)
    work.move([row for row in leased if row.sequence not in judged], DispatchState.READY)
    for row in leased:
        work.event_of([row.dispatch_id], EventKind.RETURNED, step=row.step_version)


def _drop_versions(work: Transaction, version: int) -> None:
    for epoch, orphan in work.connection.execute(
        "SELECT epoch, version FROM ledger WHERE lineage AND version > ? ORDER BY version", (version,)
    ).fetchall():
        work.event(EventKind.VERSION_ORPHANED, policy=PolicyVersion(epoch, orphan).key)
    work.connection.execute("UPDATE ledger SET lineage = 0 WHERE version > ?", (version,))


def _end_lost(work: Transaction) -> None:
    detail = "only dispatched when a new trainer epoch opened"
    end(
        work,
        [
            Ending(dispatch_id=row.dispatch_id, reason=FailReason.LOST, detail=detail, readmit=True)
            for row in work.rows_in(DispatchState.DISPATCHED)
        ],
    )


def _end_orphans(work: Transaction, limits: Sequence[tuple[int, int]]) -> tuple[GroupHeader, ...]:
    """Reject waiting groups with tokens that are out of the lineage; the headers of the others."""
    kept: list[GroupHeader] = []
    endings: list[Ending] = []
    for header in headers(work, work.rows_in(DispatchState.READY, DispatchState.AUDITED)):
        orphans = sorted(policy for policy in header.policies if not _in_lineage(policy, limits))
        if orphans:
            detail = f"tokens of {', '.join(policy.key for policy in orphans)}"
            endings.append(
                Ending(
                    dispatch_id=header.dispatch_id, reason=RejectReason.ORPHANED_VERSION, detail=detail, readmit=True
                )
            )
        else:
            kept.append(header)
    end(work, endings)
    return tuple(kept)


def _queue(work: Transaction) -> tuple[Readmission, ...]:
    sql = "SELECT d.prompt, r.attempt FROM readmissions r JOIN dispatches d USING (sequence) ORDER BY r.sequence"
    return tuple(
        Readmission(prompt=prompt_of(prompt), attempt=attempt) for prompt, attempt in work.connection.execute(sql)
    )


def _totals(work: Transaction) -> Totals:
    row = work.connection.execute(
        "SELECT count(*), coalesce(sum(trained), 0), coalesce(sum(masked), 0), coalesce(sum(dropped), 0) FROM commits "
        "WHERE lineage"
    ).fetchone()
    return Totals(steps=row[0], trajectories_trained=row[1], trajectories_masked=row[2], trajectories_dropped=row[3])
