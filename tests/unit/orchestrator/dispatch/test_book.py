"""Which ready groups nobody has answered for: those of a replica that is taking a policy over, or failed to."""

from typing import Any

from support.loop.group_headers import header
from support.loop.replica_room import ReplicaRoom

from orchestrator.deadlines import Progress
from orchestrator.dispatch.accounts import Accounts
from orchestrator.dispatch.book import Book
from orchestrator.observers import Observers
from rollout.types.dispatch import Counts, Totals
from rollout.types.prompts import PromptCursor
from rollout.types.protocols import Recovery
from rollout.types.weights import PolicyVersion

V1 = PolicyVersion(1, 1)


def book_of(room: ReplicaRoom) -> Book:
    store: Any = room
    recovery = Recovery(
        trainer_epoch=1,
        cursor=PromptCursor(),
        next_dispatch=0,
        ready=(),
        readmissions=(),
        ledger=(),
        counts=Counts(),
        totals=Totals(),
    )
    return Book(
        store=store,
        replicas=room.replicas,
        recovery=recovery,
        accounts=Accounts(8),
        progress=Progress(lambda: 0.0),
        observers=Observers(),
    )


def test_a_group_is_held_from_the_update_of_its_replica_to_its_rejection():
    """Between a failure and the rejection lie waits for the store, in which training may look for a batch."""
    room = ReplicaRoom(2, straggler_s=0.01)

    async def work() -> None:
        book = book_of(room)
        book.pool.finish([header("old", replica=1), header("new", replica=1, policy=V1), header("other", policy=V1)])
        room.slots[1].may_update.clear()
        room.publisher.offer(room.manifest(1))
        assert await room.heard.committed.get() == 1
        assert book.unverified() == {"new"}
        await room.lifecycle.fail(1, 1, "its engine core is dead")
        assert room.replicas[1].applying is None
        assert book.unverified() == {"new"}

    room.run(work)
