"""What the audits of a replica say over time: a gap that grows while every single audit still passes, and a sampler
that does not draw from the distribution that it declares. It knows numbers, never the service.

Evidence about samplers is added up by CUSUM charts: for those that are sharper or flatter than declared, by a little
and by much, and for samples that repeat. A sampler whose inverse temperature is within 5 % of the declared one is not
expected to cross, since the nearest of `POWERS` is 10 % away: rounding is no finding.
"""

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from trainer.consistency.checks.cusum import Cusum
from trainer.consistency.checks.gap import check_drift
from trainer.consistency.checks.sampling import SamplingSums, added
from trainer.consistency.service.report import ReplicaGap
from trainer.types.evidence import CheckFinding

POWERS = (0.75, 0.9, 1.1, 1.4)
"""Powers of the declared distribution that it is held against."""
WINDOW_VERSIONS = 50
"""Newest versions that the line is fitted to."""
LEAST_VERSIONS = 10
"""Fewer say nothing."""


class SamplerFault(StrEnum):
    """What samples say about their sampler."""

    OTHER_DISTRIBUTION = "other_distribution"
    """Tokens are likelier, or less likely, than draws from the declared distribution are."""
    REPEATED_SAMPLES = "repeated_samples"
    """Samples of a group are equal more often than chance makes them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerFinding:
    """One alarm."""

    fault: SamplerFault
    sums: SamplingSums
    """Since the evidence was last 0."""

    @property
    def detail(self) -> str:
        """In words, with the numbers."""
        sums = self.sums
        if self.fault is SamplerFault.REPEATED_SAMPLES:
            return (
                f"{sums.repeats} of {sums.num_compared} samples repeat an earlier one of their group; "
                f"{sums.expected_repeats:.1f} expected by their probabilities"
            )
        power = sums.inverse_temperature
        how = f"{1.0 / power:.2f} times the declared one" if power > 0.2 else "far above the declared one"
        return (
            f"surprise minus entropy is {sums.excess / sums.num_tokens:+.3g} nats a token over {sums.num_tokens} "
            f"tokens (z {sums.z:+.1f}; 0 expected): they look drawn at a temperature {how}"
        )


class _Chart:
    """Evidence for one fault, and the sums that it came from."""

    def __init__(self, threshold: float) -> None:
        self._cusum = Cusum(threshold)
        self._sums: list[SamplingSums] = []

    @property
    def value(self) -> float:
        return self._cusum.value

    def add(self, nats: float, sums: SamplingSums) -> SamplingSums | None:
        self._sums.append(sums)
        crossed = self._cusum.add(nats)
        since = added(self._sums)
        self._sums = [] if not self._cusum.value else [since]
        return since if crossed else None


class SamplerWatch:
    """The charts of each replica; a new incarnation starts anew."""

    def __init__(self, threshold: float | None) -> None:
        """Alarm at `threshold` nats of evidence; None never."""
        self._threshold = threshold
        self._charts: dict[int, dict[float, _Chart]] = {}
        self._repeats: dict[int, _Chart] = {}
        self._incarnations: dict[int, int] = {}
        self._differs: set[int] = set()

    @property
    def evidence(self) -> float | None:
        """Largest evidence for another distribution, nats; None before the first audit."""
        return max((chart.value for charts in self._charts.values() for chart in charts.values()), default=None)

    @property
    def repeat_evidence(self) -> float | None:
        """Largest evidence for repeated samples, nats; None before the first audit."""
        return max((chart.value for chart in self._repeats.values()), default=None)

    def take(self, gap: ReplicaGap, incarnation: int) -> list[SamplerFinding]:
        """Note an audit; what crosses its threshold by it, at most one finding a fault. That samples repeat follows
        from a distribution that is sharper than declared, so it is no finding of a replica that samples from another
        one."""
        threshold, sums, slot = self._threshold, gap.sampling, gap.replica
        if threshold is None or not sums.num_tokens:
            return []
        if self._incarnations.get(slot) != incarnation:
            self._incarnations[slot] = incarnation
            self._charts[slot] = {power: _Chart(threshold) for power in POWERS}
            self._repeats[slot] = _Chart(threshold)
            self._differs.discard(slot)
        crossed = [
            since
            for power, chart in self._charts[slot].items()
            if (since := chart.add(sums.evidence_of(power), sums)) is not None
        ]
        findings: list[SamplerFinding] = []
        if crossed:
            longest = max(crossed, key=lambda since: since.num_tokens)
            findings.append(SamplerFinding(fault=SamplerFault.OTHER_DISTRIBUTION, sums=longest))
            self._charts[slot] = {power: _Chart(threshold) for power in POWERS}
            self._differs.add(slot)
        repeated = self._repeats[slot].add(sums.repeat_evidence, sums)
        if repeated is not None and slot not in self._differs:
            findings.append(SamplerFinding(fault=SamplerFault.REPEATED_SAMPLES, sums=repeated))
        return findings


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
