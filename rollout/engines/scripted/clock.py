"""Time for the scripted engine: the event loop's, or any other that a test puts in its place."""

import asyncio
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that has not happened yet."""

    def cancel(self) -> None:
        """Prevent the call."""
        ...


class Clock(Protocol):
    """Reads and schedules time, in seconds from an arbitrary origin."""

    def now(self) -> float:
        """The time, in seconds."""
        ...

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        """Call back once the clock reads `when_s` or later; never within this call."""
        ...


class LoopClock:
    """The clock of the running event loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_at(when_s, callback)
