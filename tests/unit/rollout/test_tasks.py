"""No task ends unseen, and none outlives its owner."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from rollout.errors import ConcordError, EngineError
from rollout.tasks import Tasks, unless

T = TypeVar("T")


def within_10_s(work: Coroutine[Any, Any, T]) -> T:
    async def main() -> T:
        async with asyncio.timeout(10):
            return await work

    return asyncio.run(main())


async def fails(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (EngineError("dead"), EngineError, "dead"),
        (KeyError("missing"), ConcordError, "work 1: KeyError: 'missing'"),
        (asyncio.CancelledError(), ConcordError, "work 1: what it waited for was cancelled"),
    ],
)
def test_whatever_ends_a_task_early_is_passed_on(error: BaseException, kind: type[ConcordError], text: str) -> None:
    async def main() -> ConcordError:
        failed: asyncio.Queue[ConcordError] = asyncio.Queue()
        Tasks().start(fails(error), failed.put_nowait, "work 1")
        return await failed.get()

    found = within_10_s(main())
    assert type(found) is kind and str(found) == text


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_closing_ends_what_runs_and_is_no_failure(turns: int) -> None:
    """Also what has not begun (no turn of the event loop): its coroutine is closed, or Python would warn."""

    async def main() -> None:
        tasks, failed = Tasks(), list[ConcordError]()
        tasks.start(for_ever(), failed.append, "waits")
        for _ in range(turns):
            await asyncio.sleep(0)
        await tasks.close()
        assert failed == []
        assert asyncio.all_tasks() == {asyncio.current_task()}

    within_10_s(main())


def test_a_run_that_is_closed_from_elsewhere_is_cancelled() -> None:
    async def main() -> None:
        tasks = Tasks()

        async def close() -> None:
            await tasks.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(close())
            with pytest.raises(asyncio.CancelledError):
                await tasks.run(for_ever(), "waits")

    within_10_s(main())


def test_a_wait_gives_the_result_or_ends_with_what_it_depends_on() -> None:
    async def main() -> None:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert await unless(ended, asyncio.sleep(0, "done"), lambda: EngineError("it died")) == "done"
        with pytest.raises(KeyError):
            await unless(ended, fails(KeyError("missing")), lambda: EngineError("it died"))
        asyncio.get_running_loop().call_soon(ended.set_result, None)
        with pytest.raises(EngineError, match="it died"):
            await unless(ended, for_ever(), lambda: EngineError("it died"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    within_10_s(main())
