"""When a run is said to be long without a step, and when it is ended for it."""

import asyncio

import pytest

from orchestrator.deadlines import Progress, StalledError, watch_for_stall

TICK_S = 1 / 16


class Silence:
    """A pulse whose clock goes on by `TICK_S` whenever it is looked at."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.told: list[tuple[float, str]] = []
        self.progress = Progress(self.clock)

    def clock(self) -> float:
        self.now_s += TICK_S
        return self.now_s

    async def quiet(self, silence_s: float, waits: str) -> None:
        self.told.append((silence_s, waits))

    async def stacks(self) -> str:
        return ""

    def watch(self, limit_s: float) -> None:
        with pytest.raises(StalledError):
            asyncio.run(watch_for_stall(self.progress, limit_s, self.stacks, self.quiet))


def test_half_way_to_the_limit_it_is_said_once_what_everybody_waits_for():
    room = Silence()
    room.progress.waits("training", "16 groups")
    room.watch(8 * TICK_S)
    assert room.told == [(4 * TICK_S, "training waits for 16 groups")]


def test_a_silence_that_is_no_longer_than_three_steps_is_none():
    room = Silence()
    room.now_s += 5 * TICK_S
    room.progress.beat()
    room.watch(8 * TICK_S)
    assert room.told == []


def test_what_took_time_before_the_loop_began_is_no_silence():
    room = Silence()
    room.now_s += 100.0
    room.progress.begin()
    assert room.progress.silence_s() == TICK_S
