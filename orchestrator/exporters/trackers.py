"""Feeds TensorBoard and Weights & Biases with the steps of a run, each in a thread of its own. Trouble there never ends
or delays a run."""

import queue
import threading
from collections.abc import Callable, Sequence
from importlib import util
from typing import Protocol, Self

from orchestrator.config import RunConfig
from orchestrator.exporters.tracker_tags import Points, TrackedSignals
from orchestrator.metrics.snapshot import Snapshot
from orchestrator.run_dir.layout import RunDir
from rollout.errors import ConcordError, UserError, boundary

CURE = "install it with: pip install 'concord-rl[trackers]'"
MOST_WAITING = 1000
"""Points that wait in memory for a tracker that is slow."""
CLOSE_S = 75.0
"""For what is not written when a run ends; above what Weights & Biases gives itself."""


class Tracker(Protocol):
    """Where points go."""

    def take(self, points: Points) -> None:
        """What was measured at a step."""
        ...

    def close(self) -> None:
        """Write what is buffered."""
        ...


class Trackers:
    """The trackers of a run. One that fails is reported once and dropped. A context manager."""

    def __init__(
        self,
        trackers: Sequence[tuple[str, Tracker]],
        say: Callable[[str], None],
        most_waiting: int = MOST_WAITING,
        close_s: float = CLOSE_S,
    ) -> None:
        self._feeds = [_Feed(name, tracker, most_waiting) for name, tracker in trackers]
        self._say, self._close_s = say, close_s
        self._signals = TrackedSignals()

    def __bool__(self) -> bool:
        return bool(self._feeds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, snapshot: Snapshot) -> None:
        if self._feeds:
            self._put(self._signals.of_step(snapshot))

    def score(self, snapshot: Snapshot) -> None:
        """An evaluation ended, whose score is the newest."""
        if self._feeds:
            self._put(self._signals.of_score(snapshot))

    def _put(self, points: Sequence[Points]) -> None:
        for feed in list(self._feeds):
            for each in points:
                feed.put(each)
            if feed.trouble:
                self._feeds.remove(feed)
                self._say(f"{feed.trouble}; nothing more goes to {feed.name}, the training goes on")

    def close(self) -> None:
        for feed in self._feeds:
            feed.put(None)
        for feed in self._feeds:
            if trouble := feed.ended(self._close_s):
                self._say(f"{trouble}; the last steps may be missing in {feed.name}")
        self._feeds.clear()


class _Feed:
    """Hands points to one tracker, in a thread that nobody waits for but the end of the run."""

    def __init__(self, name: str, tracker: Tracker, most_waiting: int) -> None:
        self.name, self._tracker = name, tracker
        self.trouble = ""
        """What went wrong; empty while nothing did."""
        self._waiting: queue.Queue[Points | None] = queue.Queue(most_waiting)
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, points: Points | None) -> None:
        """The next points, or None where no more are to come; does not wait."""
        try:
            self._waiting.put_nowait(points)
        except queue.Full:
            self.trouble = self.trouble or f"{self.name}: {self._waiting.maxsize} steps wait for it"

    def ended(self, within_s: float) -> str:
        """Wait for the end of the thread; what went wrong."""
        if not self.trouble:
            self._thread.join(within_s)
        if self._thread.is_alive():
            self.trouble = self.trouble or f"{self.name}: it was not done after {within_s:g} s"
        return self.trouble

    def _run(self) -> None:
        try:
            with boundary(ConcordError, self.name):
                while (points := self._waiting.get()) is not None:
                    self._tracker.take(points)
                self._tracker.close()
        except ConcordError as error:
            self.trouble = str(error)


def refuse_missing(config: RunConfig) -> None:
    """Say that a tracker is not installed before any work is done.

    Raises:
        UserError: one that the config asks for is missing.
    """
    asked = {"tensorboard": config.trackers.tensorboard, "wandb": config.trackers.wandb != "off"}
    missing = [name for name, wanted in asked.items() if wanted and util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"trackers.{missing[0]} is on, but the package {missing[0]} is not installed; {CURE}, or turn it off"
        )


def open_trackers(config: RunConfig, run: RunDir, say: Callable[[str], None]) -> Trackers:
    """The trackers that the config asks for.

    Raises:
        UserError: one is not installed, or does not start.
    """
    chosen = config.trackers
    opened: list[tuple[str, Tracker]] = []
    if chosen.tensorboard:
        with boundary(UserError, "trackers.tensorboard is on, but TensorBoard does not start"):
            from orchestrator.exporters.tensorboard import TensorBoardTracker

            opened.append(("TensorBoard", TensorBoardTracker(run.tensorboard)))
    if chosen.wandb != "off":
        context = f'trackers.wandb is "{chosen.wandb}", but Weights & Biases does not start'
        with boundary(UserError, f'{context} (without a network set "offline")'):
            from orchestrator.exporters.wandb import WandbTracker

            opened.append(("Weights & Biases", WandbTracker(run, config, chosen.wandb)))
    return Trackers(opened, say)
