"""Files of a run that no accounting rests on: metric parts, gradient searches, baselines. A disk that refuses one is
reported and counted, and ends no training.

What the accounting rests on (store, weights, checkpoints) is another matter: that ends the run with the cure.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

from rollout.errors import ConcordError
from rollout.types.protocols import EventFields


class SideFileError(ConcordError):
    """A file that no accounting rests on is broken or cannot be written."""


class SideFiles:
    """Trouble with such files in one driver's life, until it is reported."""

    def __init__(self, record_event: Callable[[str, EventFields], Awaitable[None]]) -> None:
        self._record_event = record_event
        self._failing: set[str] = set()
        self._unreported: deque[tuple[str, str]] = deque()
        self.failures = 0

    @contextmanager
    def spared(self, what: str) -> Generator[None]:
        """Inside, `what` is written or removed; trouble with the disk stays inside. It is reported once, and
        again only after `what` has worked."""
        try:
            yield
        except (OSError, SideFileError) as error:
            self.failed(what, str(error))
        else:
            self._failing.discard(what)

    def failed(self, what: str, reason: str) -> None:
        self.failures += 1
        if what not in self._failing:
            self._failing.add(what)
            self._unreported.append((what, reason))

    def take_unreported(self) -> list[str]:
        """Trouble that no event reports yet, in words; it counts as reported from then on."""
        said = [f"{what}: {reason}; the training goes on" for what, reason in self._unreported]
        self._unreported.clear()
        return said

    async def report(self) -> None:
        while self._unreported:
            what, reason = self._unreported.popleft()
            await self._record_event("side_file_failed", {"what": what, "reason": reason})
