"""What callers hold and what answers them agree in every call."""

import asyncio
import inspect

import pytest

from rollout.store.sqlite.store import SqliteStore
from rollout.types.protocols import Store

CALLS = [name for name, member in vars(Store).items() if inspect.iscoroutinefunction(member)]


def test_a_store_has_its_thirteen_calls() -> None:
    assert len(CALLS) == 13


@pytest.mark.parametrize("name", CALLS)
def test_the_store_that_answers_takes_and_gives_what_callers_are_promised(name: str) -> None:
    assert inspect.signature(getattr(SqliteStore, name)) == inspect.signature(getattr(Store, name))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_sent_under_its_name_with_all_its_arguments_in_order(name: str) -> None:
    sent: list[tuple[object, ...]] = []

    async def send(called: str, *args: object) -> object:
        sent.append((called, *args))
        return "the answer"

    parameters = list(inspect.signature(getattr(Store, name)).parameters)[1:]
    answer = asyncio.run(getattr(Store(send), name)(*parameters))
    assert sent == [(name, *parameters)]
    assert answer in ("the answer", None)
