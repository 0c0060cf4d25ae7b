"""The engine core as a process: notices its death at once, and leaves nothing of it behind. It knows no vLLM and no
request."""

import asyncio
import contextlib
import os

import psutil


class CoreProcess:
    """Watches one child process through a pidfd; to be made inside the event loop.

    Liveness flags are not enough: vLLM itself learns of a killed core only seconds later, and callers would wait so
    long.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the process has ended."""
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._ended)

    @property
    def alive(self) -> bool:
        return not self.died.done()

    def close(self) -> None:
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _ended(self) -> None:
        self.close()
        if not self.died.done():
            self.died.set_result(None)


def descendants(besides: set[int] | None = None) -> list[psutil.Process]:
    """All processes below this one, without those in `besides` and without Python's own resource tracker, which belongs
    to this process for good."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid not in (besides or ()) and not _is_tracker(process)
    ]


def end(processes: list[psutil.Process], patience_s: float) -> None:
    """Wait until processes have ended, and kill those that do not. Blocks; call it in a thread."""
    _, left = psutil.wait_procs(processes, timeout=patience_s)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=patience_s)


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False
