"""A sequential test that runs for ever: evidence for a change is added up, and what speaks against it is forgotten."""


class Cusum:
    """One chart of log-likelihood ratios. Where they are exact, the mean number of additions until a false alarm is at
    least exp(threshold), and a change is found after about threshold / (mean evidence of an addition under it).

    Source: Lorden 1971, Procedures for reacting to a change in distribution, theorem 2.
    """

    def __init__(self, threshold: float) -> None:
        """Alarm at `threshold` nats."""
        self._threshold = threshold
        self.value = 0.0
        """Nats since the evidence was last 0."""

    def add(self, nats: float) -> bool:
        """Whether this addition crosses the threshold; the chart then begins anew."""
        self.value = max(0.0, self.value + nats)
        crossed = self.value >= self._threshold
        if crossed:
            self.value = 0.0
        return crossed
