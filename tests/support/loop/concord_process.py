"""The command `concord` as users run it: a process of its own on real Ray, its JSON lines, its actors, and ways to kill
them.

Every wait has a deadline. Whatever a process started is found again through its family, also when that has lost its
head.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from support.paths import MODEL

CONCORD = str(Path(sys.executable).with_name("concord"))
START_S = 90.0
"""For Ray and all actors to start, on a busy machine."""
STEP_S = 60.0
"""For a step, a command that starts no Ray, or an end in order, on a busy machine."""
GONE_S = 30.0
"""For processes that are to be gone."""
ENDLESS = "run.steps=100000"
"""Of a run that a test ends, however long the test takes to get there."""
ACTORS = ("StoreActor", "RewardActor", "TrainerActor", "EngineActor", "EpisodeActor", "ConsistencyActor")

CONFIG = """
[run]
steps = 12
batch_groups = 3
group_size = 2
dir = "{runs}"
name = "run"
[model]
type = "local"
path = "{model}"
[engine]
type = "scripted"
num_cpus = 0
slots = 4
latency_mean_s = 0.06
latency_sigma = 0.8
[trainer]
type = "scripted"
num_cpus = 0
[trainer.checkpoint]
every_steps = 4
[consistency]
mode = "off"
[cluster]
object_store_gib = 0.1
[deadlines]
health_interval_s = 0.5
"""


def write_config(folder: Path) -> Path:
    """A quick run with uneven latencies, twelve steps, and a checkpoint after every fourth; it lives in
    `folder/runs/run`."""
    path = folder / "small.toml"
    path.write_text(CONFIG.format(runs=folder / "runs", model=MODEL))
    return path


class ConcordProcess:
    """One `concord ...` with its output and its family."""

    def __init__(self, *arguments: str | Path, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self._errors = (folder / f"errors-{time.monotonic_ns()}.txt").open("w+")
        self._process = subprocess.Popen(
            [CONCORD, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            text=True,
        )
        self._root = psutil.Process(self._process.pid)
        self._family: set[psutil.Process] = {self._root}
        self._incoming: queue.Queue[str | None] = queue.Queue()
        self.output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._incoming.put(line)
        self._incoming.put(None)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines so far."""
        return [json.loads(line) for line in self.output]

    @property
    def steps(self) -> list[int]:
        """The numbers of the steps that it has printed."""
        return [line["step"] for line in self.lines if "step" in line]

    @property
    def errors(self) -> str:
        """What it has written to its error output."""
        self._errors.flush()
        return Path(self._errors.name).read_text()

    def until_step(self, step: int, within_s: float = START_S + STEP_S) -> None:
        """Read on until that step, or a later one, has been printed."""
        self.until(lambda: bool(self.steps) and self.steps[-1] >= step, f"step {step}", within_s)

    def until_said(self, text: str) -> None:
        """Read on until an event line holds `text`."""
        self.until(lambda: any(text in line.get("event", "") for line in self.lines), repr(text))

    def until(self, condition: Callable[[], bool], what: str, within_s: float = START_S + STEP_S) -> None:
        """Read on until `condition` holds; it is looked at after every line."""
        deadline = time.monotonic() + within_s
        while not condition():
            line = self._next(deadline, what)
            assert line is not None, f"it ended before {what}: {self.output[-3:]}\n{self.errors}"

    def exit_status(self, within_s: float = START_S + STEP_S) -> int:
        """Read its output to the end and wait for its exit."""
        self.take_note()
        deadline = time.monotonic() + within_s
        while self._next(deadline, f"its end, within {within_s:g} s") is not None:
            continue
        return self._process.wait(max(0.1, deadline - time.monotonic()))

    def _next(self, deadline: float, what: str) -> str | None:
        try:
            line = self._incoming.get(timeout=max(0.01, deadline - time.monotonic()))
        except queue.Empty:
            raise AssertionError(f"waited in vain for {what}: {self.output[-3:]}\n{self.errors}") from None
        if line is not None:
            self.output.append(line)
        return line

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the driver alone, as `kill` does."""
        self.take_note()
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the driver alone."""
        self.signal(signal.SIGKILL)
        self._process.wait(GONE_S)

    def kill_actor(self, kind: str) -> int:
        """SIGKILL the one actor of that class; answers with its process id."""
        found = self.actors(kind)
        assert len(found) == 1, f"{kind}: {found}; there are {self.actors()}"
        found[0].kill()
        return found[0].pid

    def actors(self, kind: str = "") -> list[psutil.Process]:
        """Living actor processes, all or those of one class."""
        self.take_note()
        titles = [f"ray::{name}" for name in ((kind,) if kind else ACTORS)]
        return [process for process in self._family if any(title_of(process).startswith(title) for title in titles)]

    def take_note(self) -> None:
        """Remember all processes that exist below the driver and below what it started."""
        for process in list(self._family):
            try:
                self._family.update(process.children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def left_of_it(self, within_s: float = GONE_S) -> list[str]:
        """Titles of all processes that are still alive after the deadline."""
        self.take_note()
        _, alive = psutil.wait_procs(list(self._family), timeout=within_s)
        return [title_of(process) for process in alive]

    def left_of_actors(self, within_s: float = GONE_S) -> list[str]:
        """Titles of actor processes that are still alive after the deadline."""
        _, alive = psutil.wait_procs(self.actors(), timeout=within_s)
        return [title_of(process) for process in alive]

    def close(self) -> None:
        """End everything that is left, at once."""
        self.take_note()
        for process in self._family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(list(self._family), timeout=GONE_S)
        self._process.wait(GONE_S)
        self._reader.join(GONE_S)
        self._errors.close()
        assert self._process.stdout is not None
        self._process.stdout.close()


def title_of(process: psutil.Process) -> str:
    """What `ps` shows; empty for a process that is gone."""
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
