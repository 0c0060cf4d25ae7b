"""Where Prometheus finds a run: a file in the form of its file-based service discovery, replaced whole when something
moves. Those of all runs of a folder lie together, so one pattern in Prometheus' config finds every run, present and to
come."""

import json
from collections.abc import Mapping
from pathlib import Path

from orchestrator.run_dir.layout import write_atomic


class Targets:
    """The endpoints of one run: its own, and those of engines that serve metrics themselves."""

    def __init__(self, path: Path, run: str, own: str) -> None:
        """`path`: the file, `PROMETHEUS/RUN.json` beside the run directories. One of a run that is not there any more
        goes: nobody will ever answer at its address."""
        self._path, self._run, self._own = path, run, own
        self._engines: Mapping[int, str] | None = None

    def show(self, engines: Mapping[int, str]) -> None:
        """Engines serve at these addresses (host:port by slot); writes only what is not on the disk yet."""
        if engines == self._engines:
            return
        entries = [{"targets": [self._own], "labels": {"job": "concord", "run": self._run}}]
        entries += [
            {"targets": [address], "labels": {"job": "concord-engine", "run": self._run, "replica": str(slot)}}
            for slot, address in sorted(engines.items())
        ]
        self._path.parent.mkdir(exist_ok=True)
        for other in self._path.parent.glob("*.json"):
            if not (self._path.parents[1] / other.stem).is_dir():
                other.unlink(missing_ok=True)
        write_atomic(self._path, json.dumps(entries, indent=2) + "\n")
        self._engines = dict(engines)
