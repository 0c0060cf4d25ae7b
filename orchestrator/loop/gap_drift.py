"""Watches each replica's gap over the versions: one that grows while every single audit still passes. It knows numbers,
never the service."""

from collections import OrderedDict

from trainer.consistency.checks.gap import check_drift
from trainer.consistency.service.report import ReplicaGap
from trainer.types.evidence import CheckFinding

WINDOW_VERSIONS = 50
"""Newest versions that the line is fitted to."""
LEAST_VERSIONS = 10
"""Fewer say nothing."""


class GapDrift:
    """One line a replica. A drift is reported once, and again only after the gap was flat in between."""

    def __init__(self) -> None:
        self._readings: dict[int, OrderedDict[int, tuple[float, int]]] = {}
        self._incarnations: dict[int, int] = {}
        self._told: set[int] = set()

    def take(self, gap: ReplicaGap, incarnation: int) -> CheckFinding | None:
        """Note an audit; the finding when a drift begins. Audits of one version count as one reading, by their tokens;
        a new incarnation starts anew."""
        if not gap.num_tokens:
            return None
        if self._incarnations.get(gap.replica) != incarnation:
            self._incarnations[gap.replica] = incarnation
            self._readings[gap.replica] = OrderedDict()
            self._told.discard(gap.replica)
        readings = self._readings[gap.replica]
        mean, tokens = readings.get(gap.newest.version, (0.0, 0))
        total = tokens + gap.num_tokens
        readings[gap.newest.version] = ((mean * tokens + gap.mean_abs * gap.num_tokens) / total, total)
        while len(readings) > WINDOW_VERSIONS:
            readings.popitem(last=False)
        return self._fresh(gap.replica, _drift(readings))

    def _fresh(self, replica: int, found: CheckFinding | None) -> CheckFinding | None:
        if found is None:
            self._told.discard(replica)
            return None
        if replica in self._told:
            return None
        self._told.add(replica)
        return found


def _drift(readings: OrderedDict[int, tuple[float, int]]) -> CheckFinding | None:
    if len(readings) < LEAST_VERSIONS:
        return None
    return next(iter(check_drift([mean for mean, _ in readings.values()], list(map(float, readings)))), None)
