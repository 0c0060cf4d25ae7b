"""How a run stands, on disk: who drives it (`driver.json`), and what it came to (`summary.json`). Written by the
driver, read by whoever looks at the run from outside."""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, cast

import psutil

from orchestrator.run_dir.history import How, RunEnd
from orchestrator.run_dir.layout import RunDir, write_atomic

START_TOLERANCE_S = 2.0
"""Two readings of one process's start time differ by less."""
SILENCE_S = 120.0
"""Beyond `deadlines.stall_s`, after which a driver ends the run itself: a driver on another machine that is silent for
longer is gone."""
LONGEST_REASON = 2000
"""Characters of the reason that are kept; the stacks behind it are in `stacks/`."""


def write_summary(run: RunDir, summary: Mapping[str, object]) -> None:
    """`summary.json`."""
    write_atomic(run.summary, json.dumps(summary, indent=2) + "\n")


class EndRecorded(AbstractContextManager["EndRecorded"]):
    """Round all that a driver does with a run: whatever ends it early, `summary.json` says how and why. An end in order
    writes its own summary, before."""

    def __init__(self, run: RunDir, classify: Callable[[BaseException], How]) -> None:
        self._run, self._classify = run, classify
        self._summarise: Callable[[RunEnd], Mapping[str, object]] = lambda end: {"version": 0, "ended": asdict(end)}

    def begins(self, summarise: Callable[[RunEnd], Mapping[str, object]]) -> None:
        """From now on there is something to sum up."""
        self._summarise = summarise

    def __enter__(self) -> Self:
        self._run.summary.unlink(missing_ok=True)
        process = psutil.Process()
        driver = {"pid": process.pid, "host": socket.gethostname(), "started_s": process.create_time()}
        with suppress(OSError):  # what cannot be written is not known later, and ends nothing
            write_atomic(self._run.driver, json.dumps(driver) + "\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self._run.summary.exists():
            return
        end = RunEnd(how=self._classify(error), reason=first_line(error))
        with suppress(OSError):  # a full disk may be the very reason
            write_summary(self._run, self._summarise(end))


def first_line(error: BaseException) -> str:
    """What an error says, without the stacks below it."""
    return (str(error).partition("\n")[0] or type(error).__name__)[:LONGEST_REASON]


def read_end(run: RunDir, wanted: int | None) -> tuple[RunEnd | None, int]:
    """How the run ended, and the trainer's version then; None while it has no summary.

    Args:
        wanted: steps of the config, by which a summary is judged that does not say how the run ended.

    Raises:
        ValueError: there is a summary, and it cannot be read.
    """
    try:
        found: object = json.loads(run.summary.read_bytes())
    except FileNotFoundError:
        return None, 0
    if not isinstance(found, dict) or not isinstance(cast("dict[str, Any]", found).get("version"), int):
        raise ValueError("no summary of a run")
    summary = cast("dict[str, Any]", found)
    version: int = summary["version"]
    ended: Any = summary.get("ended")
    if isinstance(ended, dict):
        said = cast("dict[str, Any]", ended)
        return RunEnd(how=How(str(said.get("how"))), reason=str(said.get("reason", ""))), version
    return RunEnd(how=How.FINISHED if wanted in (None, version) else How.STOPPED), version


def gone(run: RunDir, newest_event_s: float, stall_s: float, clock: Callable[[], float] = time.time) -> str:
    """How it is known that the driver of a run without an end is gone; empty where it lives, or nobody can say.

    Args:
        newest_event_s: unix time of the newest event; 0 without one.
        stall_s: `deadlines.stall_s` of the run.
    """
    try:
        driver: Any = json.loads(run.driver.read_bytes())
        pid, host, started_s = int(driver["pid"]), str(driver["host"]), float(driver["started_s"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if host == socket.gethostname():
        return "" if _runs(pid, started_s) else f"process {pid}, which drove it, does not run any more"
    silent_s = clock() - newest_event_s
    if not newest_event_s or silent_s <= stall_s + SILENCE_S:
        return ""
    return (
        f"nothing was heard of it for {silent_s:.0f} s, and a driver ends a run by itself after {stall_s:g} s without "
        f"a step (it ran as process {pid} of {host})"
    )


def _runs(pid: int, started_s: float) -> bool:
    if pid == os.getpid():
        return True
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - started_s) <= START_TOLERANCE_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
