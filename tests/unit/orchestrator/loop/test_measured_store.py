"""The driver's store: one deadline for every call, seconds of those that are a metric, every event overheard."""

import asyncio
import inspect

import pytest

from orchestrator.loop.measured_store import OBSERVED, MeasuredStore
from rollout.errors import DeadlineError, StoreError
from rollout.types.protocols import Store

CALLS = [name for name, member in vars(Store).items() if inspect.iscoroutinefunction(member)]


class Measured:
    """A measured store over `send`, and what it said."""

    def __init__(self, store: Store, deadline_s: float = 60.0) -> None:
        self.seconds: list[tuple[str, float]] = []
        self.events: list[tuple[str, object]] = []
        self.store = MeasuredStore(
            store,
            deadline_s=deadline_s,
            observe=lambda call, seconds: self.seconds.append((call, seconds)),
            on_event=lambda kind, fields: self.events.append((kind, fields)),
        )

    def call(self, name: str) -> object:
        parameters = list(inspect.signature(getattr(Store, name)).parameters)[1:]
        return asyncio.run(getattr(self.store, name)(*parameters))


async def silent(name: str, *args: object) -> object:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def refusing(name: str, *args: object) -> object:
    raise StoreError("the disk is full")


async def counting(name: str, *args: object) -> object:
    return args


@pytest.mark.parametrize("name", CALLS)
def test_every_call_has_the_deadline_and_its_error_names_call_and_key(name: str) -> None:
    expected = rf"waited 0\.01 s for the store to answer {name} .*raise deadlines\.store_s"
    with pytest.raises(DeadlineError, match=expected):
        Measured(Store(silent), 0.01).call(name)


@pytest.mark.parametrize("name", CALLS)
def test_seconds_are_observed_of_what_the_running_loop_calls_also_when_it_fails(name: str) -> None:
    answered, failed = Measured(Store(counting)), Measured(Store(refusing))
    answered.call(name)
    with pytest.raises(StoreError, match="full"):
        failed.call(name)
    for measured in (answered, failed):
        assert [call for call, seconds in measured.seconds if seconds >= 0] == ([name] if name in OBSERVED else [])


def test_a_run_event_is_handed_to_the_listener_and_the_store() -> None:
    sent: list[tuple[object, ...]] = []

    async def send(name: str, *args: object) -> None:
        sent.append((name, *args))

    measured = Measured(Store(send))
    asyncio.run(measured.store.record_event("replica_lost", {"slot": 1}))
    assert measured.events == [("replica_lost", {"slot": 1})]
    assert sent == [("record_event", "replica_lost", {"slot": 1})]
