"""Keeps what Prometheus is told current while a loop runs. Whatever goes wrong here is told, and never ends the training.

An exporter that cannot go on closes its endpoint: old values that are served as new ones would look like a run that has stalled.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from orchestrator.exporter import Exporter
from orchestrator.live_signals import LiveSignals
from orchestrator.side_files import SideFiles
from orchestrator.targets import Targets
from orchestrator.training import StepDone
from rollout.errors import ConcordError, boundary

INTERVAL_S = 2.0
"""Between two looks at the loop, unless a step ends sooner."""


class Observing:
    """From finished steps and the loop as it stands to the exporter's newest snapshot."""

    def __init__(
        self,
        exporter: Exporter,
        live: LiveSignals,
        targets: Targets,
        side_files: SideFiles,
        on_trouble: Callable[[str], Awaitable[None]],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._exporter, self._live, self._targets, self._side_files = exporter, live, targets, side_files
        self._on_trouble, self._interval_s = on_trouble, interval_s
        self._finished: deque[tuple[StepDone, dict[str, float]]] = deque()
        self._bell = asyncio.Event()
        self._broken = False

    def step(self, done: StepDone, row: dict[str, float]) -> None:
        """A step ended; it is looked at when the loop has time."""
        if not self._broken:
            self._finished.append((done, row))
            self._bell.set()

    async def run(self) -> None:
        """Look for ever; ends by cancellation."""
        while True:
            await self.show()
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._bell.wait()
            except TimeoutError:
                continue

    async def show(self) -> None:
        """Reduce what has finished, and show all values as they are now; nothing once that went wrong."""
        self._bell.clear()
        if self._broken:
            return
        begun = time.thread_time()
        try:
            with boundary(ConcordError, "reducing signals"):
                while self._finished:
                    self._live.step(*self._finished.popleft())
                self._exporter.show(self._live.snapshot())
                with self._side_files.spared("where Prometheus finds the run"):
                    self._targets.show(self._live.engine_addresses())
                self._live.took(time.thread_time() - begun)
        except ConcordError as error:
            self._broken = True
            self._finished.clear()
            await asyncio.to_thread(self._exporter.close)
            await self._on_trouble(str(error))
