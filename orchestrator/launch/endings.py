"""What each way to end a run is called, in its summary and in its last event."""

import asyncio
from contextlib import suppress

from orchestrator.deadlines import StalledError
from orchestrator.dispatch.book import Book
from orchestrator.dispatch.failures import TooManyFailuresError
from orchestrator.run_dir.history import How, RunEnd
from rollout.errors import ConcordError


def classify(error: BaseException) -> How:
    """How an error ends a run."""
    if isinstance(error, TooManyFailuresError):
        return How.FAILURES
    if isinstance(error, StalledError):
        return How.STALLED
    return How.INTERRUPTED if isinstance(error, asyncio.CancelledError | KeyboardInterrupt) else How.ERROR


async def record_end(book: Book, end: RunEnd, version: int) -> None:
    """The run's last event. A store that does not take it may be the very reason; `summary.json` has it, too."""
    with suppress(ConcordError):
        await book.store.record_event("run_ended", {"how": end.how.value, "reason": end.reason, "version": version})
