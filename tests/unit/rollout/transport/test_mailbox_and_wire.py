"""What crosses processes: jobs in few calls, and dataclasses as tuples."""

import asyncio
import pickle
from collections.abc import Sequence

import numpy as np
import pytest
from support.builders import build_dispatch, build_group

from rollout.errors import ConcordError, EngineError, ProcessLostError
from rollout.transport.mailbox import Inbox, Outbox
from rollout.types.codec import encode
from rollout.types.wire import wired


def test_wired_values_survive_pickling() -> None:
    group = build_group(routing=(2, 2))
    encoded = encode(group)
    assert pickle.loads(pickle.dumps(encoded.header)) == encoded.header
    assert pickle.loads(pickle.dumps(build_dispatch(3))) == build_dispatch(3)
    again = pickle.loads(pickle.dumps(group.trajectories[0]))
    assert encode(group).payload.tobytes() == encoded.payload.tobytes()
    np.testing.assert_array_equal(again.token_ids, group.trajectories[0].token_ids)
    assert (again.version_spans, again.tag, again.timings) == (
        group.trajectories[0].version_spans,
        group.trajectories[0].tag,
        group.trajectories[0].timings,
    )


def test_a_class_with_one_field_cannot_be_wired() -> None:
    from dataclasses import dataclass

    with pytest.raises(TypeError, match="at least two"):

        @wired
        @dataclass(frozen=True, slots=True)
        class Single:
            only: int


class Post:
    """Both ends in one process; counts the calls between them."""

    def __init__(self) -> None:
        self.submits: list[int] = []
        self.collects = 0
        self.lost: Exception | None = None
        self.gate = asyncio.Event()
        self.inbox: Inbox[int, int] = Inbox(self.work)
        self.outbox: Outbox[int, int] = Outbox(self.submit, self.collect)

    async def work(self, job: int) -> int:
        if job < 0:
            raise EngineError(f"job {job} failed")
        if job == 77:
            raise ValueError("seventy-seven")
        if job == 88:
            raise asyncio.CancelledError  # as from a future that somebody else cancelled
        if job == 99:
            await self.gate.wait()
        return job * 2

    async def submit(self, jobs: list[tuple[int, int]]) -> None:
        self.submits.append(len(jobs))
        self.inbox.submit("client", jobs)

    async def collect(self) -> Sequence[tuple[int, int | ConcordError]]:
        if self.lost is not None:
            raise self.lost
        self.collects += 1
        return await self.inbox.collect("client")


def test_jobs_of_one_turn_travel_in_one_call_and_each_gets_its_own_answer() -> None:
    async def main() -> None:
        post = Post()
        async with asyncio.timeout(10.0):
            answers = await asyncio.gather(*(post.outbox.ask(n) for n in range(50)))
        assert answers == [n * 2 for n in range(50)]
        assert post.submits == [50]
        assert post.collects <= 3

    asyncio.run(main())


def test_a_job_that_fails_fails_alone() -> None:
    async def main() -> None:
        post = Post()
        async with asyncio.timeout(10.0):
            answers = await asyncio.gather(*(post.outbox.ask(n) for n in (1, -5, 3, 77, 88)), return_exceptions=True)
        assert answers[0] == 2
        assert answers[2] == 6
        assert isinstance(answers[1], EngineError)
        assert isinstance(answers[3], ConcordError) and "ValueError: seventy-seven" in str(answers[3])
        assert isinstance(answers[4], ConcordError) and "cancelled" in str(answers[4])

    asyncio.run(main())


def test_a_slow_job_holds_up_no_other() -> None:
    async def main() -> None:
        post = Post()
        slow = asyncio.ensure_future(post.outbox.ask(99))
        async with asyncio.timeout(10.0):
            assert await post.outbox.ask(4) == 8
            assert not slow.done()
            post.gate.set()
            assert await slow == 198

    asyncio.run(main())


@pytest.mark.parametrize("lost", [ProcessLostError("the partner is gone"), OSError("the partner is gone")])
def test_all_askers_learn_that_the_partner_is_gone(lost: Exception) -> None:
    async def main() -> None:
        post = Post()
        post.lost = lost
        async with asyncio.timeout(10.0):
            answers = await asyncio.gather(*(post.outbox.ask(n) for n in (99, 99)), return_exceptions=True)
        expected = ProcessLostError if isinstance(lost, ProcessLostError) else ConcordError
        assert all(isinstance(answer, expected) and "is gone" in str(answer) for answer in answers)

    asyncio.run(main())


def test_a_cancelled_asker_leaves_the_others_alone() -> None:
    async def main() -> None:
        post = Post()
        slow = asyncio.ensure_future(post.outbox.ask(99))
        async with asyncio.timeout(10.0):
            await post.outbox.ask(1)
            slow.cancel()
            post.gate.set()
            assert await post.outbox.ask(2) == 4

    asyncio.run(main())
