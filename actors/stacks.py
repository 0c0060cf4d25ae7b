"""Stacks of actor processes, for people. Each process writes its own when it is signalled, also while its main thread
is busy or waits; only a process on the same machine may signal it. Ray-free."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

ANSWER_S = 3.0
"""How long all processes of a machine may take to write their stacks."""
POLL_S = 0.1


def stacks_file(run_dir: Path, name: str) -> Path:
    """Where the process `name` writes its stacks."""
    return run_dir / "stacks" / f"{name}.txt"


def dump_stacks_here(pids: Mapping[str, int], run_dir: Path) -> dict[str, str]:
    """The present stacks of processes of this machine by their names, or why there are none. Blocks; call it in a
    thread.

    Args:
        pids: process id by name, of processes that have passed `actors.process.enter_process` on this machine.
        run_dir: the directory of their run.
    """
    files = {name: stacks_file(run_dir, name) for name in pids}
    before = {name: _size(file) for name, file in files.items()}
    asked = {name for name, pid in pids.items() if _signalled(pid)}
    sizes, deadline = before, time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        last, sizes = sizes, {name: _size(files[name]) for name in asked}
        if all(before[name] < size == last[name] for name, size in sizes.items()):
            break
    return {name: _answer(name, asked, files[name], before[name]) for name in pids}


def _answer(name: str, asked: set[str], file: Path, begin: int) -> str:
    if name not in asked:
        return "no stacks: its process is gone"
    if _size(file) == begin:
        return f"no stacks: its process did not answer within {ANSWER_S:g} s"
    with file.open("rb") as stream:
        stream.seek(begin)
        return stream.read().decode(errors="replace")


def _signalled(pid: int) -> bool:
    """Whether there was a process to signal: one that handles the signal, not one that got the id of a process that is
    gone and that the signal would end."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
        if not caught >> (signal.SIGUSR1 - 1) & 1:
            return False
        os.kill(pid, signal.SIGUSR1)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return True


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
