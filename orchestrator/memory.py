"""Peak resident memory by actor, sampled; children (engine cores) count with the actor that started them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import psutil


class PeakMemory:
    """Samples the processes of a fleet on this machine."""

    def __init__(self, processes: Callable[[], Awaitable[Mapping[str, int]]], interval_s: float = 1.0) -> None:
        self._processes = processes
        self._interval_s = interval_s
        self._peak: dict[str, int] = {}

    async def run(self) -> None:
        """Sample for ever; ends by cancellation."""
        while True:
            for name, pid in (await self._processes()).items():
                self._peak[name] = max(self._peak.get(name, 0), tree_rss_bytes(pid))
            await asyncio.sleep(self._interval_s)

    def peak_mb(self) -> dict[str, float]:
        """Peak MiB by actor name."""
        return {name: round(peak / 2**20, 1) for name, peak in sorted(self._peak.items())}


def tree_rss_bytes(pid: int) -> int:
    """Resident bytes of a process and its children; shared pages are counted in each. 0 for a process that is gone."""
    try:
        parent = psutil.Process(pid)
        processes = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
