"""Peak resident memory by actor, sampled; children (engine cores) count with the actor that started them, Ray's own
processes with nobody."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import psutil


class PeakMemory:
    """Samples the processes of a fleet on this machine."""

    def __init__(self, processes: Callable[[], Awaitable[Mapping[str, int]]], interval_s: float = 2.0) -> None:
        self._processes = processes
        self._interval_s = interval_s
        self._peak: dict[str, int] = {}
        self.now: Mapping[str, int] = {}
        """Bytes by actor name, of the newest sample."""

    async def run(self) -> None:
        """Sample for ever; ends by cancellation."""
        while True:
            self.now = tree_rss_bytes(await self._processes())
            for name, size in self.now.items():
                self._peak[name] = max(self._peak.get(name, 0), size)
            await asyncio.sleep(self._interval_s)

    def peak_mb(self) -> dict[str, float]:
        """Peak MiB by actor name."""
        return {name: round(peak / 2**20, 1) for name, peak in sorted(self._peak.items())}


def tree_rss_bytes(roots: Mapping[str, int]) -> dict[str, int]:
    """Resident bytes by name: of each root process and its descendants down to the next root. Shared pages count in
    each. One pass over all processes."""
    owners = {pid: name for name, pid in roots.items()}
    parents: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for process in psutil.process_iter(["pid", "ppid", "memory_info"]):
        if process.info["memory_info"] is not None:
            parents[process.pid], sizes[process.pid] = process.info["ppid"], process.info["memory_info"].rss
    totals = dict.fromkeys(roots, 0)
    for pid, size in sizes.items():
        ancestor = pid
        while ancestor not in owners and ancestor in parents:
            ancestor = parents[ancestor]
        owner = owners.get(ancestor)
        if owner is not None and (owner != "driver" or ancestor == pid):
            totals[owner] += size
    return totals
