"""Which numbers can be the log-probability of a sampled token."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_NATS = -80.0
"""A token below it was not sampled from the distribution that its log-prob belongs to: of a vocabulary of V tokens, all
that lie below together are drawn with a probability of at most V e^-80, 5e-30 for 262,144 tokens. Engines write such
numbers in place of one that they do not have: -9999, -1e9 or the least number of a format. Ratios down to here stay
within float32 (e^88.7)."""
ROUNDING_NATS = 1e-5
"""A logit minus a log-sum-exp may round above 0 by an ulp of the logit; up to here that is no error."""


def impossible(logprobs: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """[n] True where a number is no log-prob of a sampled token: not finite, above 0, or below `LEAST_NATS`."""
    return ~((logprobs >= LEAST_NATS) & (logprobs <= ROUNDING_NATS))
