"""How long each replica takes for its groups: the newest of each, and how far the slowest lies behind the others."""

from collections import deque

import numpy as np

from orchestrator.metrics.types import UNMEASURED

NEWEST = 16
"""Groups of a replica that are kept."""
LEAST = 8
"""Groups that every replica must have before they are compared."""


class ReplicaSpeeds:
    """Fed with every group that came back."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def add(self, replica: int, generation_s: float) -> None:
        self._seconds.setdefault(replica, deque(maxlen=NEWEST)).append(generation_s)

    def columns(self) -> dict[str, float]:
        """`replica_slowness` and `slowest_replica`."""
        medians = {
            replica: float(np.median(seconds)) for replica, seconds in self._seconds.items() if len(seconds) >= LEAST
        }
        if len(medians) < 2 or len(medians) < len(self._seconds):
            return {"replica_slowness": UNMEASURED, "slowest_replica": UNMEASURED}
        slowest = max(medians, key=lambda replica: medians[replica])
        others = float(np.median([seconds for replica, seconds in medians.items() if replica != slowest]))
        return {"replica_slowness": medians[slowest] / max(others, 1e-6), "slowest_replica": float(slowest)}
