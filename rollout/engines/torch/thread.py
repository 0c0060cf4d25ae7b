"""The thread that decodes: runs commands between steps, and steps while there is work. It knows no event loop."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from rollout.engines.torch.core import DecodeCore, SampleDone
from rollout.errors import ConcordError, EngineError, boundary

T = TypeVar("T")
_CURE = "if memory ran out, lower engine.max_num_seqs or engine.max_model_len"


class Command(Generic[T]):
    """Something to do with the core between two steps, and where its outcome goes; not done once that is cancelled."""

    def __init__(self, act: Callable[[DecodeCore], T]) -> None:
        self.act, self.future = act, Future[T]()

    def run(self, core: DecodeCore) -> None:
        """Run it and pass on its result, or its error."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            with boundary(EngineError, f"the torch engine failed ({_CURE})"):
                self.future.set_result(self.act(core))
        except ConcordError as error:
            self.future.set_exception(error)

    def fail(self, error: ConcordError) -> None:
        """Pass on the reason why it is not run."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class DecodeThread:
    """Owns the core: nobody else touches it."""

    def __init__(
        self,
        build: Callable[[], DecodeCore],
        deliver: Callable[[list[SampleDone]], None],
        num_threads: int,
        *,
        deterministic: bool,
    ) -> None:
        """Start to `build` the core, on this thread, which also hands over ended samples with `deliver`."""
        self.ready: Future[DecodeCore] = Future()
        self.failure: ConcordError | None = None
        """What ended this thread, if something did."""
        self.busy_s = 0.0
        self._build, self._deliver, self._num_threads, self._deterministic = build, deliver, num_threads, deterministic
        self._commands: SimpleQueue[Sequence[Command[Any]] | None] = SimpleQueue()
        self._drains: list[Command[None]] = []
        """Run as soon as sampling has stopped."""
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether commands are still served."""
        return self.failure is None and self._thread.is_alive()

    def call(self, act: Callable[[DecodeCore], T]) -> "Future[T]":
        """Run `act` between two steps."""
        command = Command(act)
        self.send([command])
        return command.future

    def send(self, commands: Sequence[Command[Any]]) -> None:
        """Run `commands`, all between the same two steps."""
        if self.alive:
            self._commands.put(commands)
        else:
            self._fail(commands)

    def drained(self) -> "Future[None]":
        """Done when a pause has taken effect."""
        command = Command(lambda core: core.note_pause())
        self.call(lambda _: self._drains.append(command))
        return command.future

    def stop(self) -> None:
        """End after the current step; commands that still wait fail."""
        self._commands.put(None)
        self._thread.join()
        self._fail_waiting()  # what came after its last look

    def _run(self) -> None:
        torch.set_num_threads(1 if self._deterministic else self._num_threads)
        if self._deterministic:
            torch.use_deterministic_algorithms(mode=True)
        try:
            with boundary(EngineError, "the torch engine could not start"):
                core = self._build()
        except ConcordError as error:
            self.failure = error
            self.ready.set_exception(error)
            return
        self.ready.set_result(core)
        try:
            with boundary(EngineError, f"the torch engine failed in a decode step ({_CURE})"):
                self._serve(core)
        except ConcordError as error:
            self.failure = error
        self._fail_waiting()

    def _serve(self, core: DecodeCore) -> None:
        while self._run_commands(core):
            if core.can_step:
                started_s = time.monotonic()
                done = core.step()
                self.busy_s += time.monotonic() - started_s
                if done:
                    self._deliver(done)
            if self._drains and core.sampling_has_stopped:
                for command in self._drains:
                    command.run(core)
                self._drains.clear()

    def _run_commands(self, core: DecodeCore) -> bool:
        """Run what waits, waiting for something when there is nothing to step; False when it is to stop."""
        while not (self._commands.empty() and (core.can_step or self._drains)):
            commands = self._commands.get()
            if commands is None:
                return False
            for command in commands:
                command.run(core)
        return True

    def _fail_waiting(self) -> None:
        while not self._commands.empty():
            self._fail(self._commands.get() or ())
        self._fail(self._drains)
        self._deliver([])

    def _fail(self, commands: Sequence[Command[Any]]) -> None:
        error = EngineError(f"the torch engine is not running: {self.failure or 'it was stopped'}; restart the replica")
        for command in commands:
            command.fail(error)
