"""Ctrl-C and SIGTERM: what they mean at each moment of a command. Owns the signal handlers; knows no Ray, no training
and no engine.

Before the loop runs, a signal ends the command at once. While it runs, the first one asks it to end after its step,
with a checkpoint; the second one, or the first one's deadline, ends it at once. While actors are being ended, signals
are ignored: that has a deadline of its own.
"""

import asyncio
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rollout.errors import ConcordError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
NOT_BEGUN = "stopped by a signal before the run began; nothing is left running"


class Stopped(ConcordError):
    """A signal ended the command before it could end in order."""


@contextmanager
def interruptible() -> Generator[None]:
    """SIGTERM does what Ctrl-C does, for the length of the context.

    Raises:
        Stopped: one of them came where nothing more particular was said about it.
    """
    with handlers_restored():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        except KeyboardInterrupt as cause:
            raise Stopped(NOT_BEGUN) from cause


@contextmanager
def handlers_restored() -> Generator[None]:
    """Whatever becomes of the handlers in the context, they are put back at its end."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """From now on signals do nothing: what is being ended has deadlines of its own."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopSignals:
    """What the signals do while the event loop of a run is up. Install it after `ray.init`, which would undo it."""

    def __init__(self, limit_s: float, say: Callable[[str], None]) -> None:
        """`limit_s` is for the running step and its checkpoint; `say` speaks to whoever started the run."""
        self._limit_s = limit_s
        self._say = say
        self._request_stop: Callable[[], None] | None = None
        self._asked = False
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, request_stop: Callable[[], None]) -> None:
        """From now on, the first signal calls `request_stop`."""
        self._request_stop = request_stop

    @contextmanager
    def installed(self) -> Generator[None]:
        """Handle signals for the length of the context by asking the run to stop, or by cancelling the task that
        entered it."""
        events, self._task = asyncio.get_running_loop(), asyncio.current_task()
        for number in STOP_SIGNALS:
            events.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in STOP_SIGNALS:
                events.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._request_stop is None or self._asked:
            self._end_now()
            return
        self._asked = True
        self._say(f"stopping after the running step, within {self._limit_s:g} s; a second signal stops at once")
        self._request_stop()
        self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._end_now)

    def run_has_ended(self) -> None:
        """What is left to do is closing, which the limit of the running step must not cut short."""
        if self._timer is not None:
            self._timer.cancel()

    def _end_now(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
