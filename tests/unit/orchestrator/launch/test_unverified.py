"""What a resume must not train on: groups of a replica that never showed that it had their policy."""

from orchestrator.launch.launch import unverified_at_the_end
from orchestrator.run_dir.record import RunEvent
from rollout.types.weights import PolicyVersion


def event(kind: str, replica: int, version: int | None) -> RunEvent:
    policy = None if version is None else PolicyVersion(1, version).key
    return RunEvent(kind=kind, step=0, fields={"replica": replica, "policy": policy})


def open_at_the_end(*events: RunEvent) -> set[tuple[int, int]]:
    return {(slot, policy.version) for slot, policy in unverified_at_the_end(events)}


def test_a_straggler_is_in_doubt_for_what_it_had_not_taken_over_when_the_run_ended():
    events = [event("replica_straggles", 0, 3), event("replica_straggles", 1, 4)]
    assert open_at_the_end(*events) == {(0, 3), (1, 4)}


def test_a_straggler_that_caught_up_is_in_doubt_no_more():
    events = [event("replica_straggles", 0, 3), event("replica_straggles", 1, 3), event("replica_caught_up", 0, 4)]
    assert open_at_the_end(*events) == {(1, 3)}


def test_what_a_replica_failed_at_stays_in_doubt_and_a_failure_of_its_process_alone_leaves_none():
    assert open_at_the_end(event("replica_failed", 1, 5), event("replica_failed", 0, None)) == {(1, 5)}
