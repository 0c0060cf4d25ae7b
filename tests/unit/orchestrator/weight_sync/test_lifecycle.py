"""The life of a replica: one restart a slot, no failure of an incarnation that is gone, no work before everybody knows
it, and no run that ends while a replica is left."""

import asyncio

import pytest
from support.loop.replica_room import ReplicaRoom, Worker, settle

from rollout.errors import EngineError
from rollout.types.weights import PolicyVersion

REASON = "its log-probs are 2 nats a token away from the trainer's: weight_sync"


def test_groups_that_are_judged_while_a_replica_restarts_do_not_end_its_new_incarnation():
    """Every one of them was sampled by the incarnation that is gone."""
    room = ReplicaRoom(2)

    async def work() -> None:
        room.slots[1].may_start.clear()
        await room.lifecycle.fail(1, 1, REASON)
        for _ in range(5):
            await settle()
            await room.lifecycle.fail(1, 1, REASON)
        room.slots[1].may_start.set()
        assert await room.heard.serves.get() == 1
        await room.lifecycle.fail(1, 1, REASON)
        await settle()
        replica = room.replicas[1]
        assert (replica.incarnation, replica.port, room.serving()) == (2, room.slots[1].engines[1], [0, 1])
        assert (room.lifecycle.restarts, len(room.heard.failed), room.slots[1].starts) == (1, 1, 2)

    room.run(work)


def test_failures_at_the_same_moment_begin_one_restart():
    room = ReplicaRoom(2)

    async def work() -> None:
        await asyncio.gather(*(room.lifecycle.fail(0, 1, reason) for reason in ("a", "b", "c")))
        assert await room.heard.serves.get() == 0
        await settle()
        assert (room.replicas[0].incarnation, room.lifecycle.restarts) == (2, 1)
        assert [failure.reason for failure in room.heard.failed] == ["a"]

    room.run(work)


def test_what_an_incarnation_that_is_gone_was_not_verified_for_is_tainted_all_the_same():
    room = ReplicaRoom(2)
    v1 = PolicyVersion(1, 1)

    async def work() -> None:
        await room.lifecycle.fail(0, 1, "its engine core is dead")
        assert await room.heard.serves.get() == 0
        await room.lifecycle.fail(0, 1, "it did not answer", (v1,))
        assert room.replicas.is_tainted(0, 1, frozenset((v1,)))
        assert not room.replicas.is_tainted(0, 2, frozenset((v1,)))
        assert room.replicas[0].incarnation == 2

    room.run(work)


def test_a_replica_serves_only_when_every_episode_worker_knows_it():
    room, worker = ReplicaRoom(2), Worker()

    async def work() -> None:
        await room.attach(worker)
        worker.may_connect.clear()
        worker.asked.clear()
        await room.lifecycle.fail(0, 1, REASON)
        await worker.asked.wait()
        await settle()
        assert room.serving() == [1]
        worker.may_connect.set()
        assert await room.heard.serves.get() == 0
        assert worker.knows[0] is room.slots[0].engines[1]

    room.run(work)


def test_a_worker_that_comes_while_a_replica_starts_knows_its_new_incarnation():
    room, early, late = ReplicaRoom(1), Worker(), Worker()

    async def work() -> None:
        await room.attach(early)
        early.may_connect.clear()
        early.asked.clear()
        room.slots[0].failing_starts = 0
        await room.lifecycle.fail(0, 1, REASON)
        await early.asked.wait()
        joining = asyncio.ensure_future(room.attach(late))
        await settle()
        early.may_connect.set()
        await joining
        assert await room.heard.serves.get() == 0
        assert early.knows[0] is late.knows[0] is room.slots[0].engines[1]

    room.run(work)


def test_a_worker_that_waits_for_an_engine_which_dies_meanwhile_knows_the_next_one():
    room, worker = ReplicaRoom(1), Worker()

    async def work() -> None:
        worker.may_connect.clear()
        joining = asyncio.ensure_future(room.attach(worker))
        await worker.asked.wait()
        await room.lifecycle.fail(0, 1, REASON)
        await settle()
        worker.may_connect.set()
        await joining
        assert await room.heard.serves.get() == 0
        assert worker.knows[0] is room.slots[0].engines[1]

    room.run(work)


def test_a_dead_episode_worker_does_not_fail_the_start_of_a_healthy_engine():
    room, dead, alive = ReplicaRoom(1), Worker(), Worker()

    async def work() -> None:
        await room.attach(dead)
        await room.attach(alive)
        dead.dead = True
        await room.lifecycle.fail(0, 1, REASON)
        assert await room.heard.serves.get() == 0
        assert (room.slots[0].starts, alive.knows[0]) == (2, room.slots[0].engines[1])

    room.run(work)


def test_a_slot_that_does_not_come_up_is_tried_again_with_growing_pauses_while_another_serves():
    room = ReplicaRoom(2)

    async def work() -> None:
        room.slots[1].failing_starts = 6
        await room.lifecycle.fail(1, 1, REASON)
        pauses: list[float] = []
        for attempt in range(1, 7):
            event = await room.event("replica_start_failed")
            assert (event["replica"], event["attempt"]) == (1, attempt)
            assert "no memory is left" in event["reason"]
            pauses.append(event["pause_s"])
        assert pauses == [0.001 * 2**n for n in range(6)]
        assert room.serving() == [0]
        await room.event("replica_restarted")
        assert room.serving() == [0, 1]

    room.run(work)


def test_a_run_ends_when_no_replica_is_left_and_none_comes_up():
    room = ReplicaRoom(2)

    async def work() -> None:
        for slot in (0, 1):
            room.slots[slot].failing_starts = 100
            await room.lifecycle.fail(slot, 1, REASON)
        await asyncio.Event().wait()

    with pytest.raises(EngineError, match="no memory is left"):
        room.run(work)
    assert min(slot.starts for slot in room.slots) >= 4
