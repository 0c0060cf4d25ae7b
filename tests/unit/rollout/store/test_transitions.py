"""Each transition of the store: what it takes, what it refuses, what it writes down."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.builders import BASE, build_dispatch, build_group, build_prompt

from rollout.errors import FencedError, StoreError
from rollout.store.sqlite.store import SqliteStore
from rollout.types.codec import decode, encode
from rollout.types.dispatch import Counts, Dispatch, Ending, FailReason, LedgerEntry, RejectReason, StepCommit
from rollout.types.prompts import Message, Prompt, PromptCursor
from rollout.types.trajectory import Annotation, EncodedGroup
from rollout.types.weights import PolicyVersion


def groups_of(dispatches: Sequence[Dispatch], policy: PolicyVersion = BASE) -> list[EncodedGroup]:
    return [encode(build_group(d, spans=((policy, 8),))) for d in dispatches]


def commit_of(version: int, *dispatch_ids: str, epoch: int = 1, masked: int = 0) -> StepCommit:
    return StepCommit(
        policy=PolicyVersion(epoch, version),
        dispatch_ids=dispatch_ids,
        trajectories_trained=2 * len(dispatch_ids),
        trajectories_masked=masked,
        trajectories_dropped=0,
    )


def opened(run_dir: Path, dispatched: int = 0, put: int = 0) -> tuple[SqliteStore, list[Dispatch]]:
    """A recovered store with `dispatched` dispatches, the first `put` of them ready."""
    store = SqliteStore(run_dir)
    store.recover(None)
    dispatches = [build_dispatch(number) for number in range(dispatched)]
    store.dispatch(1, dispatches, PromptCursor(index=dispatched))
    store.put(groups_of(dispatches[:put]))
    return store, dispatches


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_a_new_store_is_empty_and_at_its_first_epoch(tmp_path: Path) -> None:
    recovery = SqliteStore(tmp_path).recover(None)
    assert (recovery.trainer_epoch, recovery.next_dispatch, recovery.cursor, recovery.counts) == (
        1,
        0,
        PromptCursor(),
        Counts(),
    )


def test_nothing_is_dispatched_before_the_first_epoch(tmp_path: Path) -> None:
    with pytest.raises(FencedError, match="epoch 1, the store is at 0"):
        SqliteStore(tmp_path).dispatch(1, [build_dispatch()], PromptCursor())


def test_a_leased_group_comes_back_byte_for_byte_in_the_order_asked(tmp_path: Path) -> None:
    store, dispatches = opened(tmp_path, 4, 0)
    encoded = groups_of(dispatches)
    assert store.put(encoded) == ("d-0", "d-1", "d-2", "d-3")
    leased = store.lease(1, ["d-2", "d-0", "d-3"])
    assert leased.dispatch_ids == ("d-2", "d-0", "d-3")
    for payload, index in zip(leased.payloads, (2, 0, 3), strict=True):
        assert np.array_equal(payload, encoded[index].payload)
        assert decode(payload).dispatch_id == f"d-{index}"


def test_a_group_is_leased_once(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 3, 3)
    store.lease(1, ["d-0"])
    with pytest.raises(StoreError, match=r"d-0 \(leased\)"):
        store.lease(1, ["d-1", "d-0"])
    assert store.counts().ready == 2


def test_a_lease_that_names_a_group_twice_or_an_unknown_one_leases_nothing(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 3, 2)
    for ids, message in (
        (["d-0", "d-0"], "asked 2 times"),
        (["d-0", "d-2"], r"d-2 \(dispatched\)"),
        (["d-0", "nobody"], "no dispatch nobody"),
    ):
        with pytest.raises(StoreError, match=message):
            store.lease(1, ids)
    assert store.counts().leased == 0


def test_a_second_put_of_a_dispatch_is_refused_with_an_event(tmp_path: Path) -> None:
    store, dispatches = opened(tmp_path, 2, 1)
    assert store.put(groups_of([*dispatches, dispatches[1]])) == ("d-1",)
    assert store.put(groups_of(dispatches[1:])) == ()
    assert [e["dispatch_id"] for e in events(tmp_path) if e["kind"] == "put_refused"] == ["d-0", "d-1", "d-1"]


def test_a_put_of_an_ended_dispatch_is_refused_with_an_event(tmp_path: Path) -> None:
    store, dispatches = opened(tmp_path, 1)
    store.reject(1, [Ending(dispatch_id="d-0", reason=FailReason.DEADLINE, detail="300 s", readmit=False)])
    assert store.put(groups_of(dispatches)) == ()
    assert events(tmp_path)[-1]["kind"] == "put_refused"
    assert events(tmp_path)[-1]["reason"] == "deadline"
    assert store.counts().failed == (("deadline", 1),)


def test_a_put_that_cannot_be_right_puts_nothing(tmp_path: Path) -> None:
    store, dispatches = opened(tmp_path, 2)
    good, other = groups_of(dispatches)
    wrong_prompt = encode(build_group(dataclasses.replace(dispatches[1], prompt=build_prompt("p-9"))))
    cut = EncodedGroup(header=other.header, payload=other.payload[:-1])
    for bad, message in (
        (groups_of([build_dispatch(7)])[0], "no dispatch d-7"),
        (wrong_prompt, "of prompt p-9"),
        (cut, "encode it again"),
        (groups_of([dispatches[1]], PolicyVersion(2, 0))[0], "e2-v0"),
    ):
        with pytest.raises(StoreError, match=message):
            store.put([good, bad])
    assert store.counts().ready == 0
    assert store.put([good, other]) == ("d-0", "d-1")
    assert decode(store.lease(1, ["d-1"]).payloads[0]).dispatch_id == "d-1"


def test_an_attempt_is_recorded_once(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 2)
    for batch in ([build_dispatch(2), build_dispatch(1)], [build_dispatch(2), build_dispatch(2)]):
        with pytest.raises(StoreError, match="already recorded"):
            store.dispatch(1, batch, PromptCursor(index=9))
    assert store.counts().total == 2


def test_the_prompt_cursor_never_goes_back(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 2)
    with pytest.raises(StoreError, match="prompts would come twice"):
        store.dispatch(1, [build_dispatch(2)], PromptCursor(index=1))
    store.dispatch(1, [build_dispatch(2)], PromptCursor(pass_index=1, index=0))


def test_the_cursor_and_every_part_of_a_prompt_survive_a_crash(tmp_path: Path) -> None:
    chat = Prompt(
        prompt_id="c",
        pass_index=0,
        messages=(Message(role="user", content='say "ü"\n'),),
        answer=None,
        metadata=(("level", "3"),),
    )

    store, _ = opened(tmp_path)
    store.dispatch(1, [build_dispatch(0, prompt=chat)], PromptCursor(pass_index=2, index=5))
    recovery = SqliteStore(tmp_path).recover(None)
    assert recovery.cursor == PromptCursor(pass_index=2, index=5)
    assert [r.prompt for r in recovery.readmissions] == [chat]


def test_a_commit_record_holds_its_groups_until_a_checkpoint_settles_them(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 3, 3)
    store.lease(1, ["d-0", "d-1", "d-2"])
    held = store.acknowledge(commit_of(1, "d-0", "d-1"))
    assert (held.leased, held.trained_held, held.trained) == (1, ((1, 2),), 0)
    later = store.acknowledge(commit_of(2, "d-2"))
    assert later.trained_held == ((1, 2), (2, 1))
    settled = store.settle(PolicyVersion(1, 1))
    assert (settled.trained_held, settled.trained) == (((2, 1),), 2)


def test_the_same_commit_record_twice_counts_once_and_another_is_refused(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 2, 2)
    store.lease(1, ["d-0", "d-1"])
    first = store.acknowledge(commit_of(1, "d-0"))
    assert store.acknowledge(commit_of(1, "d-0")) == first
    for other in (commit_of(1, "d-1"), commit_of(1, "d-0", masked=1)):
        with pytest.raises(StoreError, match="another commit record"):
            store.acknowledge(other)
    assert [e["kind"] for e in events(tmp_path)].count("step_committed") == 1


def test_a_step_trains_only_leased_groups_each_once_and_only_forward(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 3, 3)
    store.lease(1, ["d-0", "d-1"])
    store.acknowledge(commit_of(2, "d-0"))
    for commit, message in (
        (commit_of(3, "d-1", "d-0"), r"d-0 \(trained\)"),
        (commit_of(3, "d-1", "d-2"), r"d-2 \(ready\)"),
        (commit_of(3, "d-1", "d-1"), "named 2 times"),
        (commit_of(1, "d-1"), "expected a newer step"),
    ):
        with pytest.raises(StoreError, match=message):
            store.acknowledge(commit)
    assert store.counts().leased == 1


def test_a_dispatch_ends_once_and_a_late_ending_is_an_event(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 3, 3)
    store.lease(1, ["d-0", "d-1"])
    store.acknowledge(commit_of(1, "d-0"))
    stale = [
        Ending(dispatch_id=i, reason=RejectReason.STALE, detail="", readmit=True) for i in ("d-0", "d-1", "d-1", "d-2")
    ]
    answer = store.reject(1, stale)
    assert [r.prompt.prompt_id for r in answer.readmissions] == ["p-1", "p-2"]
    assert answer.counts.rejected == (("stale", 2),)
    assert [e["dispatch_id"] for e in events(tmp_path) if e["kind"] == "ending_left_out"] == ["d-0", "d-1"]


def test_only_a_prompts_own_failures_count_as_attempts(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 3, 1)
    endings = [
        Ending(dispatch_id="d-0", reason=RejectReason.STALE, detail="", readmit=True),
        Ending(dispatch_id="d-1", reason=FailReason.REWARD_RAISED, detail="", readmit=True),
    ]
    assert [r.attempt for r in store.reject(1, endings).readmissions] == [1, 2]
    recovery = SqliteStore(tmp_path).recover(None)
    assert [(r.prompt.prompt_id, r.attempt) for r in recovery.readmissions] == [("p-0", 1), ("p-1", 2), ("p-2", 1)]


def test_a_readmitted_prompt_leaves_the_queue_with_the_dispatch_that_takes_it(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 2)
    again = [Ending(dispatch_id=i, reason=FailReason.ENGINE, detail="", readmit=True) for i in ("d-0", "d-1")]
    first = store.reject(1, again).readmissions[0]
    other_pass = build_dispatch(2, prompt=build_prompt("p-1", pass_index=1))
    store.dispatch(
        1, [build_dispatch(3, prompt=first.prompt, attempt=first.attempt), other_pass], PromptCursor(index=3)
    )
    store = SqliteStore(tmp_path)
    recovery = store.recover(None)
    assert [(r.prompt.prompt_id, r.prompt.pass_index, r.attempt) for r in recovery.readmissions] == [
        ("p-1", 0, 2),
        ("p-0", 0, 2),
        ("p-1", 1, 1),
    ]


def test_a_verdict_moves_a_ready_group_to_audited_and_other_annotations_move_nothing(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 3, 2)
    store.annotate([Annotation(dispatch_id="d-0", kind="evidence", payload=b"\x00")])
    assert store.counts().ready == 2
    store.annotate([Annotation(dispatch_id="d-0", kind="verdict", payload=b"accept")])
    assert (store.counts().ready, store.counts().audited) == (1, 1)
    store.lease(1, ["d-0"])
    store.annotate([Annotation(dispatch_id="d-0", kind="verdict", payload=b"accept, later")])
    assert store.counts().leased == 1
    with pytest.raises(StoreError, match="has no group yet"):
        store.annotate([Annotation(dispatch_id="d-2", kind="verdict", payload=b"")])


def test_the_ledger_only_goes_up(tmp_path: Path) -> None:
    store, _ = opened(tmp_path)
    for version in (0, 1, 3):
        store.commit_version(LedgerEntry(policy=PolicyVersion(1, version), digest=f"{version}"))
    for version in (3, 2):
        with pytest.raises(StoreError, match="versions only go up"):
            store.commit_version(LedgerEntry(policy=PolicyVersion(1, version), digest="x"))
    store = SqliteStore(tmp_path)
    store.recover(PolicyVersion(1, 3))
    with pytest.raises(StoreError, match="already at version 3"):
        store.commit_version(LedgerEntry(policy=PolicyVersion(2, 2), digest="x"))
    store.commit_version(LedgerEntry(policy=PolicyVersion(2, 3), digest="3"))


def test_an_older_epoch_can_change_nothing(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 2, 1)
    store.recover(None)
    before = events(tmp_path)
    for call in (
        lambda: store.dispatch(1, [build_dispatch(5)], PromptCursor(index=9)),
        lambda: store.lease(1, ["d-0"]),
        lambda: store.acknowledge(commit_of(1, "d-0")),
        lambda: store.reject(1, [Ending(dispatch_id="d-0", reason=RejectReason.STALE, detail="", readmit=False)]),
        lambda: store.commit_version(LedgerEntry(policy=PolicyVersion(1, 1), digest="")),
        lambda: store.settle(PolicyVersion(1, 1)),
    ):
        with pytest.raises(FencedError):
            call()
    assert events(tmp_path) == before


def test_a_store_that_another_process_has_recovered_is_fenced_as_a_whole(tmp_path: Path) -> None:
    old, dispatches = opened(tmp_path, 1)
    new = SqliteStore(tmp_path)
    new.recover(None)
    for call in (
        lambda: old.put(groups_of(dispatches)),
        lambda: old.commit_version(LedgerEntry(policy=BASE, digest="")),
        lambda: old.record_event("late", {}),
    ):
        with pytest.raises(FencedError, match="another process has opened trainer epoch 2"):
            call()
    assert new.counts().failed == (("lost", 1),)


def test_every_transition_is_one_numbered_event_in_the_export(tmp_path: Path) -> None:
    store, _ = opened(tmp_path, 2, 2)
    store.record_event("weights_applied", {"replica": 0, "pause_ms": 1.5})
    store.lease(1, ["d-0"])
    store.acknowledge(commit_of(1, "d-0"))
    store.settle(PolicyVersion(1, 1))
    written = events(tmp_path)
    assert [e["number"] for e in written] == list(range(1, len(written) + 1))
    assert [e["kind"] for e in written if e.get("dispatch_id") == "d-0"] == [
        "dispatched",
        "ready",
        "leased",
        "trained",
        "settled",
    ]
    assert any(e["kind"] == "weights_applied" and e["pause_ms"] == 1.5 for e in written)
    with pytest.raises(StoreError, match="number"):
        store.record_event("bad", {"number": 7})
