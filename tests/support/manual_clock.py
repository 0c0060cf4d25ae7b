"""Time for the scripted engine that a test moves by hand."""

import asyncio
import heapq
import itertools
from collections.abc import Callable

from rollout.engines.scripted.clock import Timer


class _ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """Stands still until `advance` is called."""

    _TURNS = 20
    """Turns of the event loop after each due call, so that whoever waited for it can go on before time does."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, _ManualTimer]] = []

    def now(self) -> float:
        return self._now_s

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        timer = _ManualTimer(callback)
        heapq.heappush(self._due, (when_s, next(self._order), timer))
        return timer

    async def advance(self, seconds: float) -> None:
        """Move time on, making the calls that fall due in their order."""
        end_s = self._now_s + seconds
        await self._turn()
        while self._due and self._due[0][0] <= end_s:
            when_s, _, timer = heapq.heappop(self._due)
            self._now_s = max(self._now_s, when_s)
            if timer.callback is not None:
                timer.callback()
                await self._turn()
        self._now_s = end_s

    async def _turn(self) -> None:
        for _ in range(self._TURNS):
            await asyncio.sleep(0)
