"""A version is committed when the replicas that answered suffice; a straggler gets no work until it has caught up, and
nothing that it sampled before it was verified is trained on."""

import pytest
from support.loop.replica_room import ReplicaRoom, manifest, settle

from rollout.errors import WeightSyncError
from rollout.types.weights import PolicyVersion


def test_a_straggler_does_not_hold_back_the_version_of_the_others_and_catches_up():
    room = ReplicaRoom(3, straggler_s=0.05)

    async def work() -> None:
        room.slots[2].may_update.clear()
        room.publisher.offer(manifest(1))
        assert await room.heard.committed.get() == 1
        assert (room.entries, room.serving(), room.publisher.stragglers) == ([1], [0, 1], 1)
        assert await room.event("replica_straggles") == {"replica": 2, "policy": "e1-v1"}
        room.publisher.offer(manifest(2))
        assert await room.heard.committed.get() == 2
        assert room.serving() == [0, 1]
        room.slots[2].may_update.set()
        assert await room.heard.serves.get() == 2
        assert room.serving() == [0, 1, 2]
        assert room.slots[2].engines[0].applied == [1, 2]
        assert (room.lifecycle.restarts, room.publisher.stragglers) == (0, 1)

    room.run(work)


def test_what_a_straggler_samples_before_it_is_verified_is_held():
    room = ReplicaRoom(2, straggler_s=0.05)

    async def work() -> None:
        room.slots[1].may_update.clear()
        room.publisher.offer(manifest(1))
        assert await room.heard.committed.get() == 1
        assert [replica.applying for replica in room.replicas] == [None, PolicyVersion(1, 1)]
        room.slots[1].may_update.set()
        assert await room.heard.serves.get() == 1
        assert room.replicas[1].applying is None

    room.run(work)


def test_a_straggler_that_turns_out_wrong_is_replaced_and_what_it_sampled_is_tainted():
    room = ReplicaRoom(2, straggler_s=0.05)

    async def work() -> None:
        room.slots[1].may_update.clear()
        room.slots[1].digest = "another"
        room.publisher.offer(manifest(1))
        assert await room.heard.committed.get() == 1
        room.slots[1].may_update.set()
        assert await room.heard.serves.get() == 1
        assert [failure.policy for failure in room.heard.failed] == [PolicyVersion(1, 1)]
        assert room.replicas.is_tainted(1, 1, frozenset((PolicyVersion(1, 1),)))
        assert (room.replicas[1].incarnation, room.serving()) == (2, [0, 1])

    room.run(work)


def test_fewer_than_a_quorum_wait_for_the_stragglers():
    room = ReplicaRoom(3, straggler_s=0.01, quorum=2)

    async def work() -> None:
        for slot in (1, 2):
            room.slots[slot].may_update.clear()
        room.publisher.offer(manifest(1))
        for slot in (1, 2):
            await room.slots[slot].asked_to_update.wait()
        await settle()
        assert room.entries == []
        room.slots[1].may_update.set()
        assert await room.heard.committed.get() == 1
        assert room.serving() == [0, 1]

    room.run(work)


def test_a_replica_that_starts_while_a_version_is_published_catches_up_with_it():
    room = ReplicaRoom(2)

    async def work() -> None:
        room.slots[0].may_update.clear()
        room.publisher.offer(manifest(1))
        await room.slots[0].asked_to_update.wait()
        room.slots[1].may_start.clear()
        await room.lifecycle.fail(1, 1, "killed")
        room.slots[1].may_start.set()
        assert await room.heard.serves.get() == 1
        room.slots[0].may_update.set()
        assert await room.heard.committed.get() == 1
        assert await room.heard.serves.get() == 1
        assert (room.serving(), room.slots[1].engines[1].applied) == ([0, 1], [1])

    room.run(work)


def test_no_replica_that_takes_a_version_over_ends_the_run():
    room = ReplicaRoom(2)

    async def work() -> None:
        for slot in room.slots:
            slot.digest = "another"
        room.publisher.offer(manifest(1))
        await room.heard.committed.get()

    with pytest.raises(WeightSyncError, match="no engine replica took over e1-v1"):
        room.run(work)
    assert room.entries == []
