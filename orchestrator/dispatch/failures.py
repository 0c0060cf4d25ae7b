"""Groups that fail: counted, said, slowed down, and in the end reason enough to end the run.

Consumes every dispatch whose episode ended; produces lines on the console and events `groups_failing` (one for many
failures, rarer the longer it lasts), the pauses of admission, and the end of a run that cannot train.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from orchestrator.deadlines import Progress
from orchestrator.observers import Observer
from orchestrator.run_dir.history import FailureKind, History, HistoryBuilder
from rollout.errors import ConcordError
from rollout.types.dispatch import Ending, FailReason
from rollout.types.weights import ApplyReport, PolicyVersion

GATHER_S = 1.0
"""From the first failure to the first line about it: what fails together is said together."""
FIRST_SILENCE_S = 5.0
MOST_SILENCE_S = 300.0
"""Between two lines: twice as long each time, within these bounds."""
PAUSE_FROM = 8
"""Failures in a row from which admission pauses."""
FIRST_PAUSE_S = 0.1
MOST_PAUSE_S = 30.0
"""Of admission's pauses: twice as long each time, within these bounds, until a group comes back."""
LEAST_OVER = 20
"""Episodes that must have ended in the window before a share of it is judged."""
BUCKETS = 60
"""Stretches into which the window is cut: how finely it moves on."""


class TooManyFailuresError(ConcordError):
    """So many dispatches fail that the run cannot train; the message names the most frequent exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureLimits:
    """What ends a run: `episodes.max_failures_in_a_row`, `episodes.max_failure_share`, `episodes.failure_window_s`."""

    in_a_row: int
    share: float
    window_s: float


@dataclass(frozen=True, slots=True)
class _Bucket:
    begun_s: float
    over: int = 0
    failed: int = 0

    def with_more(self, over: int, failed: int) -> "_Bucket":
        return replace(self, over=self.over + over, failed=self.failed + failed)


class FailureWindow:
    """How many of the episodes that ended in the last `window_s` failed. Holds at most `BUCKETS` + 1 counts."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._first_s: float | None = None
        self._buckets: deque[_Bucket] = deque()

    def add(self, now_s: float, over: int, failed: int) -> None:
        """So many episodes ended now, and so many of them failed."""
        if self._first_s is None:
            self._first_s = now_s
        if not self._buckets or now_s - self._buckets[-1].begun_s >= self._window_s / BUCKETS:
            self._buckets.append(_Bucket(now_s))
        while now_s - self._buckets[0].begun_s > self._window_s:
            self._buckets.popleft()
        self._buckets[-1] = self._buckets[-1].with_more(over, failed)

    def counts(self) -> tuple[int, int]:
        """(failed, over) in the window."""
        return sum(b.failed for b in self._buckets), sum(b.over for b in self._buckets)

    def share(self, now_s: float) -> float:
        """Share of failed ones; 0 before a whole window has been seen, and of too few."""
        failed, over = self.counts()
        whole = self._first_s is not None and now_s - self._first_s >= self._window_s
        return failed / over if whole and over >= LEAST_OVER else 0.0


class FailureWatch(Observer):
    """Hears of every episode that ended in one loop."""

    def __init__(
        self,
        *,
        limits: FailureLimits,
        say: Callable[[str], None],
        record_event: Callable[[str, dict[str, str | int | float | bool | None]], Awaitable[None]],
        progress: Progress,
        version: int,
        before: History,
    ) -> None:
        """`say` speaks to whoever started the run; `version` is the committed one when the loop begins, and `before`
        what had become of dispatches by then."""
        self._limits, self._say, self._record_event, self._progress = limits, say, record_event, progress
        self._version = version
        self._counted, self._window = HistoryBuilder(before), FailureWindow(limits.window_s)
        self._bell, self._returned = asyncio.Event(), asyncio.Event()
        self._pauses = 0
        self._pause_s = 0.0
        self._unsaid = 0
        self._silence_s = FIRST_SILENCE_S
        self._speaks_at_s = 0.0

    @property
    def history(self) -> History:
        """Everything that happened to dispatches; kinds of failures, since the loop began."""
        return replace(self._counted.history(), version=self._version)

    def version_committed(self, policy: PolicyVersion, reports: Sequence[ApplyReport]) -> None:
        """What fails from now on fails at this version."""
        self._version = policy.version

    def dispatches_begun(self, count: int) -> None:
        """Dispatches were recorded."""
        self._counted.begun(count)

    def episodes_over(self, returned: int, failed: Sequence[Ending]) -> None:
        """So many groups came back, and these dispatches failed."""
        now_s = self._progress.now_s()
        self._counted.came_back(returned)
        if returned:
            self._pauses = 0
            self._returned.set()
        for ending in failed:
            self._counted.failed(ending.reason.value, ending.detail, self._version)
        self._window.add(now_s, returned + len(failed), len(failed))
        if not failed:
            return
        self._returned.clear()
        if not self._unsaid and now_s >= self._speaks_at_s:
            self._speaks_at_s, self._silence_s = now_s + GATHER_S, FIRST_SILENCE_S
        self._unsaid += len(failed)
        self._bell.set()

    async def pause(self) -> None:
        """Admission waits here before it dispatches again: not at all while groups come back, ever longer while all
        fail. A group that comes back ends the pause."""
        if self._counted.in_a_row < PAUSE_FROM:
            return
        self._pause_s = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2**self._pauses)
        self._pauses += 1
        why = f"the next attempt, {self._pause_s:g} s after {self._counted.in_a_row} failures in a row"
        try:
            async with asyncio.timeout(self._pause_s):
                await self._progress.until(self._returned, "admission", why)
        except TimeoutError:
            return

    async def run(self) -> None:
        """Speak for as long as the loop runs.

        Raises:
            TooManyFailuresError: a limit is passed.
        """
        while True:
            await self._something_to_say()
            if limit := self._passed_limit():
                if self._unsaid:
                    await self._speak()
                raise TooManyFailuresError(self._last_words(limit))
            if self._unsaid and self._progress.now_s() >= self._speaks_at_s:
                await self._speak()
                self._speaks_at_s = self._progress.now_s() + self._silence_s
                self._silence_s = min(MOST_SILENCE_S, 2 * self._silence_s)

    async def _something_to_say(self) -> None:
        left_s = max(0.0, self._speaks_at_s - self._progress.now_s()) if self._unsaid else None
        try:
            async with asyncio.timeout(left_s):
                await self._bell.wait()
        except TimeoutError:
            return
        self._bell.clear()

    def _passed_limit(self) -> str:
        in_a_row, share = self._counted.in_a_row, self._window.share(self._progress.now_s())
        if in_a_row >= self._limits.in_a_row:
            return f"{in_a_row} dispatches failed in a row (episodes.max_failures_in_a_row is {self._limits.in_a_row})"
        if share > self._limits.share:
            failed, over = self._window.counts()
            return (
                f"{failed} of the {over} dispatches that ended in the last {self._limits.window_s:g} s failed "
                f"(episodes.max_failure_share is {self._limits.share:g})"
            )
        return ""

    def _last_words(self, limit: str) -> str:
        return f"{limit}, {_most(self._counted.history())}; mend that and resume the run, or raise the limit"

    async def _speak(self) -> None:
        history, failed = self._counted.history(), self._unsaid
        self._unsaid = 0
        most = history.most_frequent()
        pause = f"; the next attempt after pauses of {self._pause_s:g} s" if self._pauses else ""
        self._say(
            f"groups fail: {failed} more, {sum(history.failed.values())} of {history.over} so far, {history.in_a_row} "
            f"in a row (the run ends at {self._limits.in_a_row}); {_most(history)}{pause}"
        )
        await self._record_event("groups_failing", _fields(failed, history, most, self._pause_s if self._pauses else 0))


def _most(history: History) -> str:
    """The most frequent failure, in words."""
    most = history.most_frequent()
    return "" if most is None else f"most often ({most.count} times) {most}"


def _fields(
    failed: int, history: History, most: FailureKind | None, pause_s: float
) -> dict[str, str | int | float | bool | None]:
    return {
        "failures": failed,
        "failed": sum(history.failed.values()),
        "over": history.over,
        "in_a_row": history.in_a_row,
        "pause_s": pause_s,
        "reason": None if most is None else most.reason,
        "place": None if most is None else most.place,
        "detail": None if most is None else most.detail,
        "of_this_kind": 0 if most is None else most.count,
    }


def failures_of(endings: Sequence[Ending]) -> list[Ending]:
    """Those that ended without a group."""
    return [ending for ending in endings if isinstance(ending.reason, FailReason)]
