"""Whether sampled tokens look like draws from the declared distribution, whatever the engine says of them. Numpy only;
it knows no model and no engine.

Under the declared distribution p the surprise -log p of a sampled token has mean H (its entropy) and the variance of
log p, so surprise minus entropy, summed over tokens, is a martingale of known variance: stopping a sample early or late
does not move its mean. A sampler that draws from p^b instead moves it by (1 - b) times the variance, to first order;
any truncation or penalty looks like some b.

Another sample of the same prompt repeats an earlier one with the summed probability of the distinct earlier ones: what
is beyond it is a seed that does not change.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

COPIED = 0.2
"""Share of copied samples that the evidence for repeats is measured against."""
MOST_PER_REPEAT = 5.0
"""Nats of evidence that one repeat counts for at most: a single oddity is no finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSums:
    """Sums over scored tokens, and over the samples of groups."""

    num_tokens: int = 0
    excess: float = 0.0
    """Surprise minus entropy, nats."""
    variance: float = 0.0
    """Variance of log p under p, squared nats."""
    num_compared: int = 0
    """Samples that had another of their group before them."""
    repeats: int = 0
    """Those of them that are equal to an earlier one."""
    expected_repeats: float = 0.0
    """Sum of their probabilities to be."""
    repeat_evidence: float = 0.0
    """Log-likelihood ratio, nats: a share `COPIED` of the samples is copied, against none."""

    @property
    def z(self) -> float:
        """The excess in its own standard deviations; 0 where nothing was left to chance."""
        return self.excess / math.sqrt(self.variance) if self.variance > 0.0 else 0.0

    @property
    def inverse_temperature(self) -> float:
        """The tokens look drawn from the declared distribution to this power, to first order: above 1 where the sampler
        is sharper than it says. 1 where nothing was left to chance."""
        return 1.0 - self.excess / self.variance if self.variance > 0.0 else 1.0

    def evidence_of(self, power: float) -> float:
        """Log-likelihood ratio of the declared distribution to `power` against itself, nats, to second order in power -
        1."""
        shift = power - 1.0
        return -shift * self.excess - 0.5 * shift * shift * self.variance


NO_SAMPLES = SamplingSums()
"""Sums over nothing."""


def added(sums: Iterable[SamplingSums]) -> SamplingSums:
    """All of them together."""
    parts = list(sums)
    return SamplingSums(**{each.name: sum(getattr(part, each.name) for part in parts) for each in fields(SamplingSums)})


def token_sums(
    logprobs: NDArray[np.floating], entropies: NDArray[np.floating], variances: NDArray[np.floating]
) -> SamplingSums:
    """Sums over [N] sampled tokens: log p, entropy and variance of log p, in nats, recomputed under the declared
    distribution."""
    return SamplingSums(
        num_tokens=int(logprobs.size),
        excess=float(-(logprobs + entropies).sum(dtype=np.float64)),
        variance=float(variances.sum(dtype=np.float64)),
    )


def repeat_sums(samples: Sequence[tuple[bytes, float]]) -> SamplingSums:
    """Sums over the samples of one group, in their order.

    Args:
        samples: (the sequence, the recomputed log-prob of all that was sampled in it) of each.
    """
    earlier: dict[bytes, float] = {}
    compared, repeats, expected, evidence = 0, 0, 0.0, 0.0
    for sequence, logprob in samples:
        if earlier:
            probability = min(1.0, sum(map(math.exp, earlier.values())))
            compared, expected = compared + 1, expected + probability
            repeats += sequence in earlier
            evidence += _evidence(probability) if sequence in earlier else math.log(1.0 - COPIED)
        earlier.setdefault(sequence, min(0.0, logprob))
    return SamplingSums(num_compared=compared, repeats=repeats, expected_repeats=expected, repeat_evidence=evidence)


def _evidence(probability: float) -> float:
    """Of a repeat that had this probability."""
    if probability <= 0.0:
        return MOST_PER_REPEAT
    return min(MOST_PER_REPEAT, math.log((1.0 - COPIED) + COPIED / probability))
