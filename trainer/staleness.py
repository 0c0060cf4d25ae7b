"""How old the tokens of a trajectory are when they are trained on. Everything here is token-aligned: entry t belongs to token t."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSummary:
    """Ages of the sampled tokens of one trajectory, in optimizer steps."""

    worst: int
    mean: float
    distinct: int
    """Versions that sampled at least one token."""
    oldest: int
    """Version of the oldest token."""


def token_staleness(trajectory: Trajectory, train_version: int) -> NDArray[np.int64]:
    """[T] `train_version` minus the version of the weights that sampled each token; -1 where the token was given.

    Raises:
        ValueError: a token is newer than the weights that are to be trained.
    """
    ages = np.full(trajectory.token_ids.size, -1, dtype=np.int64)
    for span in trajectory.version_spans:
        age = train_version - span.policy.version
        if age < 0:
            raise ValueError(f"trajectory {trajectory.trajectory_id}: tokens of version {span.policy.version} in a step on {train_version}, expected older")
        ages[span.start : span.end] = age
    return ages


def summarize_staleness(trajectory: Trajectory, train_version: int) -> StalenessSummary:
    """Worst and mean age over the sampled tokens, and how many versions they come from."""
    ages = token_staleness(trajectory, train_version)[trajectory.sampled]
    versions = _versions(trajectory)
    return StalenessSummary(worst=int(ages.max()), mean=float(ages.mean()), distinct=len(versions), oldest=min(versions))


def _versions(trajectory: Trajectory) -> frozenset[int]:
    spans: Iterable[int] = (span.policy.version for span in trajectory.version_spans)
    return frozenset(spans)
