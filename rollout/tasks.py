"""Tasks that outlive the call that starts them, and waits that something else may end.

Here alone a task is made outside a `TaskGroup`: every task has an owner, and no failure of one goes unseen.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from rollout.errors import ConcordError, DeadlineError, boundary

T = TypeVar("T")


class Tasks:
    """Owns tasks: each is kept until it ends."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, None], failed: Callable[[ConcordError], None], name: str) -> None:
        """Run `work` beside what runs.

        Args:
            failed: takes whatever ended `work` early: a `ConcordError` as it is, any other error as one that begins
                with `name`, a cancellation that came from what `work` waited for likewise. It must not raise.
        """
        self._own(_watched(work, failed, name), work, name)

    async def run(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """The result of `work`, which `close` may cancel."""
        return await self._own(work, work, name)

    async def close(self) -> None:
        while self._running:
            for task in self._running:
                task.cancel()
            await asyncio.wait(self._running)

    def _own(self, body: Coroutine[Any, Any, T], work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(body, name=name)
        self._running.add(task)
        task.add_done_callback(partial(self._forget, work))
        return task

    def _forget(self, work: Coroutine[Any, Any, Any], task: asyncio.Task[Any]) -> None:
        work.close()  # does nothing, unless the task was cancelled before its first step
        self._running.discard(task)


async def _watched(work: Coroutine[Any, Any, None], failed: Callable[[ConcordError], None], name: str) -> None:
    task = asyncio.current_task()
    assert task is not None
    try:
        with boundary(ConcordError, name):
            await work
    except ConcordError as error:
        failed(error)
    except asyncio.CancelledError:
        if task.cancelling():
            raise
        failed(ConcordError(f"{name}: what it waited for was cancelled"))


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


async def unless(ended: asyncio.Future[Any], work: Coroutine[Any, Any, T], error: Callable[[], ConcordError]) -> T:
    """The result of `work`, or `error()` as soon as `ended` is done. `work` is then cancelled, and nobody waits for how
    it takes that.

    Raises:
        ConcordError: `error()`; what `work` raises, it raises here, too.
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise error()
        return task.result()
    finally:
        task.cancel()
        _leaving.add(task)
        task.add_done_callback(_left)


def settle(future: asyncio.Future[T], answer: T | ConcordError) -> None:
    """Give an answer, or the reason why there is none, to whoever waits for it, unless they have given up."""
    if future.done():
        return
    if isinstance(answer, ConcordError):
        future.set_exception(answer)
    else:
        future.set_result(answer)


_leaving: set[asyncio.Task[Any]] = set()
"""Tasks of `unless` that are over, or cancelled and on their way out."""


def _left(task: asyncio.Task[Any]) -> None:
    _leaving.discard(task)
    if not task.cancelled():
        task.exception()  # whoever waited has it, or has something else to report
