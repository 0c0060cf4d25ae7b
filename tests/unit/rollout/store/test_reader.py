"""A run's store can be read while it runs and after it has ended."""

from pathlib import Path

import pytest
from support.builders import build_dispatch, build_group

from rollout.errors import StoreError
from rollout.store.sqlite.reader import open_reader
from rollout.store.sqlite.store import SqliteStore
from rollout.types.codec import encode
from rollout.types.dispatch import DispatchState, Ending, LedgerEntry, RejectReason, StepCommit
from rollout.types.prompts import PromptCursor
from rollout.types.trajectory import Annotation
from rollout.types.weights import PolicyVersion

STEP = PolicyVersion(1, 1)


def write(run_dir: Path) -> SqliteStore:
    """Three dispatches: one trained and held, one rejected, one without a group."""
    store = SqliteStore(run_dir)
    store.recover(None)
    dispatches = [build_dispatch(number) for number in range(3)]
    store.dispatch(1, dispatches, PromptCursor(index=3))
    store.put([encode(build_group(d, seed=number)) for number, d in enumerate(dispatches[:2])])
    store.annotate([Annotation(dispatch_id="d-0", kind="evidence", payload=b"\x01\x02")])
    store.lease(1, ["d-0"])
    store.acknowledge(
        StepCommit(
            policy=STEP, dispatch_ids=("d-0",), trajectories_trained=2, trajectories_masked=0, trajectories_dropped=0
        )
    )
    store.commit_version(LedgerEntry(policy=STEP, digest="x"))
    store.reject(1, [Ending(dispatch_id="d-1", reason=RejectReason.STALE, detail="age 3 > 2", readmit=True)])
    return store


def check(run_dir: Path) -> None:
    reader = open_reader(run_dir)
    trained, rejected, running = (reader.dispatch_record(f"d-{number}") for number in range(3))
    assert trained is not None
    assert rejected is not None
    assert running is not None
    assert (trained.state, trained.step, trained.dispatch, trained.has_group) == (
        DispatchState.LEASED,
        STEP,
        build_dispatch(0),
        True,
    )
    assert (rejected.state, rejected.reason, rejected.detail) == (DispatchState.REJECTED, "stale", "age 3 > 2")
    assert (running.state, running.has_group) == (DispatchState.DISPATCHED, False)
    assert reader.dispatch_record("nobody") is None
    group = reader.read_group("d-1")
    assert group is not None
    assert (
        group.trajectories[1].token_ids.tolist()
        == build_group(build_dispatch(1), seed=1).trajectories[1].token_ids.tolist()
    )
    assert reader.read_group("d-2") is None
    assert reader.dispatch_of_trajectory("d-1/1") == "d-1"
    assert reader.dispatch_of_trajectory("d-1/") is None
    assert [event["kind"] for event in reader.events("d-1")] == ["dispatched", "ready", "rejected"]
    assert reader.annotations("d-0") == (Annotation(dispatch_id="d-0", kind="evidence", payload=b"\x01\x02"),)
    assert reader.ledger() == (LedgerEntry(policy=STEP, digest="x"),)
    assert [commit.dispatch_ids for commit in reader.commits()] == [("d-0",)]
    reader.close()


def test_a_running_run_can_be_read(tmp_path: Path) -> None:
    store = write(tmp_path)
    check(tmp_path)
    store.close()


def test_a_finished_run_can_be_read(tmp_path: Path) -> None:
    write(tmp_path).close()
    check(tmp_path)


def test_a_crashed_run_can_be_read(tmp_path: Path) -> None:
    store = write(tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("store.sqlite", "store.sqlite-wal"):
        (copy / name).write_bytes((tmp_path / name).read_bytes())
    (copy / "tokens").symlink_to(tmp_path / "tokens")
    check(copy)
    store.close()


def test_reading_needs_no_trainer_epoch_and_changes_nothing(tmp_path: Path) -> None:
    store = write(tmp_path)
    before = store.counts(), (tmp_path / "events.jsonl").read_text()
    check(tmp_path)
    assert (store.counts(), (tmp_path / "events.jsonl").read_text()) == before
    store.settle(STEP)
    assert store.counts().trained == 1


def test_a_directory_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="give the directory of a run"):
        open_reader(tmp_path)


def test_a_group_whose_bytes_were_cut_is_an_error_that_says_so(tmp_path: Path) -> None:
    write(tmp_path).close()
    segment = tmp_path / "tokens" / "segment-000001.bin"
    segment.write_bytes(segment.read_bytes()[:700])
    reader = open_reader(tmp_path)
    assert reader.read_group("d-0") is not None
    with pytest.raises(StoreError, match="the segment was cut"):
        reader.read_group("d-1")
    reader.close()
