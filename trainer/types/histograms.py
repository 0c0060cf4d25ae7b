"""Values reduced to counts by bucket: how a distribution travels on a report. Numpy only.

Bucket i holds the values in (edges[i - 1], edges[i]], as Prometheus counts them; the last one holds what is above all
edges.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RATIOS = (1.001, 1.01, 1.05, 1.1, 1.25, 1.5, 2.0, 5.0, 10.0, 100.0)
"""Importance ratios at which the buckets of a log-ratio end, on either side of 1."""
LOG_RATIO_EDGES: tuple[float, ...] = tuple(
    round(sign * math.log(r), 6) for sign, side in ((-1, reversed(RATIOS)), (1, RATIOS)) for r in side
)
"""Nats; symmetric, so that a ratio and its inverse are treated alike."""


@dataclass(frozen=True, slots=True)
class BucketCounts:
    """So many values by bucket, and their sum."""

    counts: tuple[int, ...]
    """One a bucket: one more than there are edges."""
    total: float
    """Sum of the values."""


NO_LOG_RATIOS = BucketCounts((0,) * (len(LOG_RATIO_EDGES) + 1), 0.0)


def bucket_counts(values: NDArray[np.floating] | NDArray[np.integer], edges: Sequence[float]) -> BucketCounts:
    """Count finite values by bucket. What is not finite has no sum and is for a count of its own: it is left out."""
    finite = values[np.isfinite(values)]
    found = np.bincount(np.searchsorted(np.asarray(edges), finite, side="left"), minlength=len(edges) + 1)
    return BucketCounts(tuple(found.tolist()), float(finite.sum(dtype=np.float64)))
