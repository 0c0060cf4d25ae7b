"""Every wait has a deadline and a name; a loop that stops moving is found and explained."""

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable

from rollout.errors import ConcordError, DeadlineError

QUIET_SHARE = 0.5
"""Share of the limit after which a silence is spoken of."""
QUIET_STEPS = 3.0
"""A silence that is shorter than so many of the longest step so far is none."""
STACKS_S = 40.0
"""For the stacks of all actors, those on other machines included."""


class StalledError(DeadlineError):
    """No step finished for `deadlines.stall_s`."""


class Progress:
    """The pulse of the run: who waits for what, and when a step last finished."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = clock()
        self._longest_s = 0.0
        self._beats = 0
        self._waits: dict[str, str] = {}

    def begin(self) -> None:
        """From now on steps may come: what took time before was no silence."""
        self._last = self._clock()

    def beat(self) -> None:
        self._longest_s = max(self._longest_s, self.silence_s())
        self._last = self._clock()
        self._beats += 1

    @property
    def beats(self) -> int:
        """Steps that finished."""
        return self._beats

    @property
    def longest_s(self) -> float:
        """The longest silence that a step ended."""
        return self._longest_s

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
        return self._clock() - self._last

    def describe(self) -> str:
        return (
            "; ".join(f"{who} waits for {what}" for who, what in self._waits.items() if what)
            or "nobody says what it waits for"
        )


Quiet = Callable[[float, str], Awaitable[None]]
"""Is told how many seconds no step has finished, and what everybody waits for."""


async def watch_for_stall(
    progress: Progress, limit_s: float, dump: Callable[[], Awaitable[str]], quiet: Quiet | None = None
) -> None:
    """Ends only by raising: when no step finished for `limit_s`. Before, once in each silence, `quiet` is told: after
    `QUIET_SHARE` of the limit, where no step took nearly as long.

    Raises:
        StalledError: what each part of the loop waits for, and all stacks.
    """
    told_of = -1
    # It waits for nothing to happen, which no event can announce.
    while (left_s := limit_s - (silence_s := progress.silence_s())) > 0:
        until_quiet_s = max(QUIET_SHARE * limit_s, QUIET_STEPS * progress.longest_s) - silence_s
        if quiet is not None and until_quiet_s <= 0 and progress.beats != told_of:
            told_of = progress.beats
            await quiet(silence_s, progress.describe())
            continue
        await asyncio.sleep(max(0.05, min(left_s, until_quiet_s) if until_quiet_s > 0 else left_s))
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
