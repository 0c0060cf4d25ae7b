"""What a run directory must hold, read back from disk after whatever happened to the run."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rollout.store.sqlite.journal import EventKind
from rollout.store.sqlite.reader import StoreReader, open_reader
from rollout.types.weights import PolicyVersion

ENDS = {EventKind.SETTLED, EventKind.REJECTED, EventKind.FAILED}


def summary_of(run: Path) -> dict[str, Any]:
    """`summary.json`."""
    return json.loads((run / "summary.json").read_text())


def events_of(run: Path) -> list[dict[str, Any]]:
    """`events.jsonl`, in order; after a crash a line may stand there twice, with the same number. A line that is being
    written is none yet."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()]
    return list({event["number"]: event for event in events}.values())


def kinds_of(run: Path) -> Counter[str]:
    """How often each kind of event was recorded."""
    return Counter(event["kind"] for event in events_of(run))


def assert_counts_add_up(summary: dict[str, Any]) -> None:
    """Invariant 1."""
    ended = summary["trained"] + sum(summary["rejected"].values()) + sum(summary["failed"].values())
    assert summary["dispatched"] == ended + summary["in_flight"]


def assert_record(run: Path, *, steps: int, batch_groups: int, max_staleness: int) -> None:
    """Invariants 1 to 4 as far as the disk shows them, for a run that stands at version `steps`."""
    reader = open_reader(run)
    try:
        commits = reader.commits()
        assert [commit.policy.version for commit in commits] == list(range(1, steps + 1))
        trained = [dispatch_id for commit in commits for dispatch_id in commit.dispatch_ids]
        assert len(trained) == len(set(trained)) == steps * batch_groups, "invariant 3"
        committed = {entry.policy for entry in reader.ledger()}
        for commit in commits:
            for dispatch_id in commit.dispatch_ids:
                versions = versions_of(reader, dispatch_id)
                assert {policy for policies in versions for policy in policies} <= committed
                assert all(commit.policy.version - 1 - policies[0].version <= max_staleness for policies in versions), (
                    "invariant 2"
                )
    finally:
        reader.close()
    assert_every_dispatch_ends_once(run)


def versions_of(reader: StoreReader, dispatch_id: str) -> list[list[PolicyVersion]]:
    """The policies of each trajectory, in the order of its tokens.

    They only ever rise, and none is older than the one that was committed when the group was dispatched: a replica that
    has not answered for the committed version gets no work.
    """
    record, group = reader.dispatch_record(dispatch_id), reader.read_group(dispatch_id)
    assert record is not None
    assert group is not None
    versions = [[span.policy for span in trajectory.version_spans] for trajectory in group.trajectories]
    assert all(policies == sorted(set(policies)) for policies in versions)
    assert all(policies[0] >= record.dispatch.policy for policies in versions)
    return versions


def assert_every_dispatch_ends_once(run: Path) -> None:
    """Each recorded dispatch has one beginning in the log, and one end if it has ended; no event is missing."""
    events = events_of(run)
    assert [event["number"] for event in events] == list(range(1, len(events) + 1))
    begun = [event["dispatch_id"] for event in events if event["kind"] == EventKind.DISPATCHED]
    ended = [event["dispatch_id"] for event in events if event["kind"] in ENDS]
    assert len(begun) == len(set(begun))
    assert len(ended) == len(set(ended))
    assert set(ended) <= set(begun)
