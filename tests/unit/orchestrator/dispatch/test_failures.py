"""Groups that fail: what is said of them and how often, how admission pauses, and when the run ends."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from orchestrator.deadlines import Progress
from orchestrator.dispatch.failures import (
    FIRST_PAUSE_S,
    GATHER_S,
    MOST_PAUSE_S,
    PAUSE_FROM,
    FailureLimits,
    FailureWatch,
    FailureWindow,
    TooManyFailuresError,
)
from orchestrator.run_dir.history import MOST_KINDS, History, HistoryBuilder
from rollout.types.dispatch import Ending, FailReason

PLACE = "/home/u/graded.py:4 in reward"


def failure(number: int, words: str = "boom", reason: FailReason = FailReason.REWARD_RAISED) -> Ending:
    detail = f"the reward of d{number:08d}-0 (prompt p{number}) raised: ValueError: {words} (at {PLACE})"
    return Ending(dispatch_id=f"d{number:08d}", reason=reason, detail=detail, readmit=True)


class Watched:
    """A failure watch with a clock that a test moves by hand."""

    def __init__(self, in_a_row: int = 1000, share: float = 1.0, window_s: float = 60.0) -> None:
        self.now_s = 0.0
        self.said: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.watch = FailureWatch(
            limits=FailureLimits(in_a_row=in_a_row, share=share, window_s=window_s),
            say=self.said.append,
            record_event=self.record,
            progress=Progress(lambda: self.now_s),
            version=0,
            before=History(),
        )

    async def record(self, kind: str, fields: dict[str, Any]) -> None:
        self.events.append({"kind": kind, **fields})

    def fail(self, count: int, words: str = "boom") -> None:
        self.watch.episodes_over(0, [failure(number, words) for number in range(count)])

    def run(self, work: Callable[["Watched"], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            task = asyncio.create_task(self.watch.run())
            try:
                await work(self)
                if task.done():
                    task.result()
            finally:
                task.cancel()

        asyncio.run(main())


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_failures_of_one_place_are_one_kind_whatever_ids_and_words_they_carry():
    counted = HistoryBuilder()
    for number in range(6):
        counted.failed("reward_raised", failure(number, f"got {number}").detail, step=number)
    counted.failed("engine", "request d00000001:0 on replica 1: gone", step=6)
    counted.failed("engine", "request d00000002:0 on replica 0: gone", step=7)
    most, other = counted.history().kinds
    assert (most.count, most.place, most.first_step, most.last_step) == (6, PLACE, 0, 5)
    assert "got 5" in most.detail
    assert (other.count, other.place, other.detail) == (2, "", "request d00000002:0 on replica 0: gone")


def test_kinds_without_end_take_no_memory_without_end_and_none_goes_uncounted():
    counted = HistoryBuilder()
    words = [a + b for a in "abcdefghijkl" for b in "abcdefghijkl"]
    for word in words:
        counted.failed("engine", word, step=0)
    history = counted.history()
    assert len(history.kinds) == MOST_KINDS + 1
    assert sum(kind.count for kind in history.kinds) == history.over == len(words)


def test_what_fails_together_is_said_in_one_line_within_seconds_and_then_ever_more_rarely():
    async def work(room: Watched) -> None:
        said_at: list[float] = []
        for tick in range(1200):
            room.now_s = tick * 0.5
            room.fail(10)
            await turns()
            said_at += [room.now_s] * (len(room.said) - len(said_at))
        assert said_at[0] == GATHER_S
        gaps = [after - before for before, after in itertools.pairwise(said_at)]
        assert gaps == [5, 10, 20, 40, 80, 160]
        assert sum(event["failures"] for event in room.events) + room.watch._unsaid == 12_000, "none is left out"

    room = Watched(in_a_row=10**6)
    room.run(work)
    assert "ValueError: boom" in room.said[0] and PLACE in room.said[0]
    first = room.events[0]
    assert (first["reason"], first["place"], first["failed"], first["over"]) == ("reward_raised", PLACE, 30, 30)


def test_a_run_without_failures_is_quiet_and_never_pauses():
    async def work(room: Watched) -> None:
        for tick in range(20):
            room.now_s = float(tick)
            room.watch.episodes_over(16, ())
            await room.watch.pause()
            await turns()

    room = Watched()
    room.run(work)
    assert room.said == room.events == []


def test_pauses_grow_within_their_bounds_while_all_fails_and_a_group_that_comes_back_ends_them():
    async def work(room: Watched) -> None:
        room.fail(PAUSE_FROM - 1)
        await room.watch.pause()
        room.fail(1)
        begun = asyncio.get_running_loop().time()
        await room.watch.pause()
        assert asyncio.get_running_loop().time() - begun >= 0.9 * FIRST_PAUSE_S
        asked: list[float] = []
        for _ in range(20):
            pausing = asyncio.create_task(room.watch.pause())
            await turns()
            asked.append(room.watch._pause_s)
            assert not pausing.done()
            pausing.cancel()
        assert asked[:3] == [2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
        assert asked[-1] == MOST_PAUSE_S
        pausing = asyncio.create_task(room.watch.pause())
        await turns()
        room.watch.episodes_over(1, ())
        await asyncio.wait_for(pausing, 5)
        await room.watch.pause()

    Watched().run(work)


def test_so_many_failures_in_a_row_end_the_run_and_one_group_in_between_does_not():
    async def work(room: Watched) -> None:
        for _ in range(10):
            room.fail(11)
            room.watch.episodes_over(1, ())
            await turns()
        room.fail(11)
        await turns()
        room.fail(1)
        await turns()

    with pytest.raises(TooManyFailuresError) as caught:
        Watched(in_a_row=12).run(work)
    said = str(caught.value)
    assert "12 dispatches failed in a row (episodes.max_failures_in_a_row is 12)" in said
    assert "most often (122 times) reward_raised" in said and PLACE in said


def test_a_share_of_failures_ends_the_run_once_a_whole_window_has_been_seen():
    async def work(room: Watched) -> None:
        for second in range(61):
            assert not room.said or second > 0
            room.now_s = float(second)
            room.fail(19)
            room.watch.episodes_over(1, ())
            await turns()

    with pytest.raises(TooManyFailuresError, match=r"episodes\.max_failure_share is 0\.9"):
        Watched(share=0.9).run(work)
    Watched(share=0.96).run(work)


def test_the_window_forgets_what_lies_before_it():
    window = FailureWindow(60.0)
    for second in range(120):
        window.add(float(second), 1, int(second < 60))
    assert window.share(119.0) <= 1 / 60
    assert window.counts()[1] <= 61


def test_few_episodes_say_nothing_of_a_share():
    window = FailureWindow(60.0)
    for second in range(0, 70, 5):
        window.add(float(second), 1, 1)
    assert window.share(70.0) == 0.0
