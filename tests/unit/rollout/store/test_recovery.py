"""What a new trainer epoch makes of what a dead one left: lineage, provisional groups, orphans, queue."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.builders import BASE, build_dispatch, build_group

from rollout.errors import FencedError, StoreError
from rollout.store.sqlite.reader import open_reader
from rollout.store.sqlite.store import SqliteStore
from rollout.types.codec import encode
from rollout.types.dispatch import Ending, FailReason, LedgerEntry, RejectReason, StepCommit, Totals
from rollout.types.prompts import PromptCursor
from rollout.types.protocols import Recovery
from rollout.types.trajectory import Annotation
from rollout.types.weights import PolicyVersion


class Run:
    """A driver in miniature: it dispatches, finishes and trains groups one by one, and can lose its store without a
    goodbye."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.store = SqliteStore(run_dir)
        self.epoch = 0
        self.number = 0

    def open(self, checkpoint: PolicyVersion | None = None) -> Recovery:
        """Open the files anew, as after kill -9, and recover."""
        self.store = SqliteStore(self.run_dir)
        recovery = self.store.recover(checkpoint)
        self.epoch, self.number = recovery.trainer_epoch, recovery.next_dispatch
        return recovery

    def group(self, *policies: PolicyVersion, put: bool = True) -> str:
        """Dispatch one group, and finish it with tokens of `policies` in turn."""
        dispatch = build_dispatch(self.number)
        self.number += 1
        self.store.dispatch(self.epoch, [dispatch], PromptCursor(index=self.number))
        if put:
            self.store.put([encode(build_group(dispatch, spans=[(policy, 3) for policy in policies or (BASE,)]))])
        return dispatch.dispatch_id

    def train(self, version: int, ids: Sequence[str]) -> None:
        policy = PolicyVersion(self.epoch, version)
        self.store.lease(self.epoch, ids)
        counted = {"trajectories_trained": 2 * len(ids), "trajectories_masked": 1, "trajectories_dropped": 0}
        self.store.acknowledge(StepCommit(policy=policy, dispatch_ids=tuple(ids), **counted))
        self.store.commit_version(LedgerEntry(policy=policy, digest=policy.key))


def test_what_was_only_dispatched_is_lost_and_its_prompt_comes_again_first(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    run.group(put=False)
    finished = run.group()
    recovery = run.open()
    assert recovery.trainer_epoch == 2
    assert recovery.counts.failed == (("lost", 1),)
    assert [r.prompt.prompt_id for r in recovery.readmissions] == ["p-0"]
    assert [header.dispatch_id for header in recovery.ready] == [finished]
    assert recovery.next_dispatch == 2


def test_a_lease_ends_with_its_epoch_and_the_header_needs_no_payload(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    ids = [run.group() for _ in range(3)]
    run.store.annotate([Annotation(dispatch_id=ids[2], kind="verdict", payload=b"accept")])
    run.store.lease(1, ids[1:])
    for segment in (tmp_path / "tokens").iterdir():
        segment.rename(segment.with_suffix(".away"))
    recovery = run.open()
    assert (recovery.counts.ready, recovery.counts.audited, recovery.counts.leased) == (2, 1, 0)
    assert [header.dispatch_id for header in recovery.ready] == ids
    assert recovery.ready[0] == encode(build_group(build_dispatch(0), spans=[(BASE, 3)])).header


def test_steps_up_to_the_checkpoint_are_trained_for_good_and_those_above_come_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    ids = [run.group() for _ in range(4)]
    for version, dispatch_id in enumerate(ids[:3], start=1):
        run.train(version, [dispatch_id])
    recovery = run.open(PolicyVersion(1, 2))
    assert (recovery.counts.trained, recovery.counts.trained_held, recovery.counts.ready) == (2, (), 2)
    assert [header.dispatch_id for header in recovery.ready] == ids[2:]
    assert [entry.policy for entry in recovery.ledger] == [PolicyVersion(1, 1), PolicyVersion(1, 2)]
    assert recovery.totals == Totals(steps=2, trajectories_trained=4, trajectories_masked=2)
    run.train(3, [ids[2]])
    reader = open_reader(tmp_path)
    assert [(c.policy, c.dispatch_ids) for c in reader.commits()] == [
        (PolicyVersion(1, 1), (ids[0],)),
        (PolicyVersion(1, 2), (ids[1],)),
        (PolicyVersion(2, 3), (ids[2],)),
    ]
    reader.close()


def test_without_a_checkpoint_everything_above_version_0_is_taken_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    run.store.commit_version(LedgerEntry(policy=BASE, digest="base"))
    base = run.group(BASE)
    run.train(1, [base])
    run.group(BASE, PolicyVersion(1, 1))
    recovery = run.open()
    assert [entry.policy for entry in recovery.ledger] == [BASE]
    assert [header.dispatch_id for header in recovery.ready] == [base]
    assert recovery.counts.rejected == (("orphaned_version", 1),)
    assert [(r.prompt.prompt_id, r.attempt) for r in recovery.readmissions] == [("p-1", 1)]
    assert recovery.totals == Totals()


def test_orphans_stay_orphans_when_a_later_epoch_has_passed_their_number(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    for version in range(1, 11):
        run.train(version, [run.group(PolicyVersion(1, version - 1))])
    run.open(PolicyVersion(1, 8))
    for version in range(9, 13):
        run.train(version, [run.group(PolicyVersion(1, 8))])
    named = {
        p: run.group(p) for p in (PolicyVersion(1, 9), PolicyVersion(1, 8), PolicyVersion(2, 11), PolicyVersion(2, 12))
    }
    recovery = run.open(PolicyVersion(2, 11))
    waiting = {header.dispatch_id for header in recovery.ready}
    assert {p.key for p, i in named.items() if i in waiting} == {"e1-v8", "e2-v11"}
    assert [e.policy.key for e in recovery.ledger] == [
        *(f"e1-v{v}" for v in range(1, 9)),
        *(f"e2-v{v}" for v in range(9, 12)),
    ]
    assert recovery.totals.steps == 11


def test_one_orphaned_token_is_enough(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    mixed = run.group(PolicyVersion(1, 4), PolicyVersion(1, 5))
    recovery = run.open(PolicyVersion(1, 4))
    assert recovery.ready == ()
    reader = open_reader(tmp_path)
    record = reader.dispatch_record(mixed)
    reader.close()
    assert record is not None
    assert (record.reason, record.detail) == ("orphaned_version", "tokens of e1-v5")


def test_a_checkpoint_that_a_later_resume_took_back_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    for version in range(1, 5):
        run.train(version, [run.group()])
    run.open(PolicyVersion(1, 2))
    for foreign, message in (
        (PolicyVersion(1, 3), "taken back by a later resume"),
        (PolicyVersion(3, 1), "different runs"),
    ):
        with pytest.raises(StoreError, match=message):
            run.store.recover(foreign)
    assert (run.open(PolicyVersion(2, 2))).trainer_epoch == 3


def test_a_resume_from_an_older_checkpoint_brings_the_prompts_of_settled_steps_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    ids = [run.group() for _ in range(3)]
    for version, dispatch_id in enumerate(ids, start=1):
        run.train(version, [dispatch_id])
    run.store.settle(PolicyVersion(1, 3))
    recovery = run.open(PolicyVersion(1, 1))
    assert recovery.counts.trained == 3
    assert [r.prompt.prompt_id for r in recovery.readmissions] == ["p-1", "p-2"]
    assert recovery.totals.steps == 1


def test_a_dead_trainers_checkpoint_settles_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    ids = [run.group() for _ in range(2)]
    run.train(1, ids[:1])
    run.open(PolicyVersion(1, 1))
    run.train(2, ids[1:])
    with pytest.raises(FencedError, match="has been replaced"):
        run.store.settle(PolicyVersion(1, 2))
    assert run.store.settle(PolicyVersion(1, 1)).trained_held == ((2, 1),)


def test_the_queue_is_in_order_of_dispatch_whatever_the_order_of_endings(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open()
    ids = [run.group(put=False) for _ in range(4)]
    late_first = [
        Ending(dispatch_id=ids[2], reason=FailReason.ENGINE, detail="", readmit=True),
        Ending(dispatch_id=ids[0], reason=RejectReason.STALE, detail="", readmit=True),
    ]
    run.store.reject(1, late_first)
    recovery = run.open()
    assert [r.prompt.prompt_id for r in recovery.readmissions] == ["p-0", "p-1", "p-2", "p-3"]
