"""Keeps Prometheus and the trackers up to date while a loop runs, from one reduction. Whatever goes wrong here is
reported, and never ends the training.

An exporter that cannot go on closes its endpoint: old values that are served as new ones would look like a run that has
stalled.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from orchestrator.exporters.prometheus import Exporter
from orchestrator.exporters.prometheus_targets import Targets
from orchestrator.exporters.trackers import Trackers
from orchestrator.metrics.snapshot import Snapshot
from orchestrator.observers import StepDone
from orchestrator.run_dir.side_files import SideFiles
from orchestrator.signals.live import LiveSignals
from rollout.errors import ConcordError, boundary

INTERVAL_S = 2.0
"""Between two looks at the loop for Prometheus; a step that ends is looked at besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sinks:
    """Where signals go besides the run directory."""

    exporter: Exporter | None = None
    trackers: Trackers | None = None

    @property
    def url(self) -> str:
        """Where Prometheus looks; empty where it has nowhere to."""
        return "" if self.exporter is None else self.exporter.url


NO_SINKS = Sinks()


class Observing:
    """Reduces steps, scores and the loop as it stands to snapshots: each step's and score's goes to the trackers, the
    newest to the exporter."""

    def __init__(
        self,
        sinks: Sinks,
        live: LiveSignals,
        targets: Targets | None,
        side_files: SideFiles,
        on_trouble: Callable[[str], Awaitable[None]],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._sinks, self._live, self._targets, self._side_files = sinks, live, targets, side_files
        self._on_trouble, self._interval_s = on_trouble, interval_s
        self._broken = False

    async def step(self, done: StepDone, row: dict[str, float]) -> None:
        """A step ended, with this metric row. It is looked at here and now, so that what the trackers get is of this
        step."""

        def look() -> None:
            self._live.step(done, row)
            snapshot = self._live.snapshot(row)
            if self._sinks.trackers is not None:
                self._sinks.trackers.step(snapshot)
            self._serve(snapshot)

        await self._spared(look)

    async def run(self) -> None:
        """Look for ever, for Prometheus alone: trackers get steps. Ends by cancellation."""
        while self._sinks.exporter is not None:
            await self.show()
            await asyncio.sleep(self._interval_s)

    async def show(self) -> None:
        """Prometheus gets all values as they are now."""
        await self._spared(lambda: self._serve(self._live.snapshot()))

    async def score(self) -> None:
        """An evaluation ended."""

        def look() -> None:
            if self._sinks.trackers is not None:
                self._sinks.trackers.score(self._live.snapshot())

        await self._spared(look)

    def _serve(self, snapshot: Snapshot) -> None:
        if self._sinks.exporter is not None and self._targets is not None:
            self._sinks.exporter.show(snapshot)
            with self._side_files.spared("where Prometheus finds the run"):
                self._targets.show(self._live.engine_addresses())

    async def _spared(self, look: Callable[[], None]) -> None:
        """Do it, unless something went wrong before."""
        if self._broken:
            return
        begun = time.thread_time()
        try:
            with boundary(ConcordError, "reducing signals"):
                look()
                self._live.took(time.thread_time() - begun)
        except ConcordError as error:
            self._broken = True
            await self._on_trouble(str(error))
            if self._sinks.exporter is not None:
                await asyncio.to_thread(self._sinks.exporter.close)
