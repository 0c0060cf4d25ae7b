"""Every wait has a deadline and a name; a loop that stops moving is found and explained."""

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollout.errors import ConcordError, DeadlineError

T = TypeVar("T")
STACKS_S = 40.0
"""For the stacks of all actors, those on other machines included."""


class StalledError(DeadlineError):
    """No step finished for `deadlines.stall_s`."""


async def within(awaitable: Awaitable[T], seconds: float, key: str, what: str) -> T:
    """Await with a deadline.

    Args:
        key: the config key that sets it; empty where none does.
        what: is waited for, for the message.

    Raises:
        DeadlineError: naming all three.
    """
    try:
        async with asyncio.timeout(seconds):
            return await awaitable
    except TimeoutError as cause:
        cure = f", or raise {key}" if key else ""
        raise DeadlineError(
            f"waited {seconds:g} s for {what} without an answer; see the stacks in the run directory{cure}"
        ) from cause


class Progress:
    """The pulse of the run: who waits for what, and when a step last finished."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._waits: dict[str, str] = {}

    def beat(self) -> None:
        """A step finished."""
        self._last = self._clock()

    def waits(self, who: str, what: str) -> None:
        """`who` waits for `what` from now on; an empty `what` is work."""
        self._waits[who] = what

    async def until(self, event: asyncio.Event, who: str, what: str) -> None:
        """Wait for `event`. It has no limit of its own: the run's, `deadlines.stall_s`, names `who` and `what`."""
        self.waits(who, what)
        try:
            await event.wait()
        finally:
            self.waits(who, "")

    def now_s(self) -> float:
        """The clock that the pulse goes by, which only goes forward."""
        return self._clock()

    def silence_s(self) -> float:
        """Seconds since the last step."""
        return self._clock() - self._last

    def describe(self) -> str:
        """Who waits for what, in one line."""
        return (
            "; ".join(f"{who} waits for {what}" for who, what in self._waits.items() if what)
            or "nobody says what it waits for"
        )


async def watch_for_stall(progress: Progress, limit_s: float, dump: Callable[[], Awaitable[str]]) -> None:
    """Ends only by raising: when no step finished for `limit_s`.

    Raises:
        StalledError: what each part of the loop waits for, and all stacks.
    """
    # It waits for nothing to happen, which no event can announce.
    while (left_s := limit_s - progress.silence_s()) > 0:  # noqa: ASYNC110
        await asyncio.sleep(max(0.05, left_s))
    waiting = progress.describe()
    try:
        async with asyncio.timeout(STACKS_S):
            stacks = await dump()
    except (ConcordError, TimeoutError) as error:
        stacks = f"the actors' stacks did not come: {str(error) or f'no answer within {STACKS_S:g} s'}"
    raise StalledError(
        f"no step finished for deadlines.stall_s = {limit_s:g} s: {waiting}\n{driver_stacks()}\n{stacks}"
    )


def driver_stacks() -> str:
    """Stacks of all threads and tasks of this process."""
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    threads = [f"thread {ident}\n{''.join(traceback.format_stack(frame))}" for ident, frame in frames.items()]
    tasks = [
        f"task {task.get_name()}: "
        f"{[f'{f.f_code.co_filename}:{f.f_lineno} {f.f_code.co_name}' for f in task.get_stack(limit=8)]}"
        for task in asyncio.all_tasks()
    ]
    return "\n".join([*threads, *tasks])
