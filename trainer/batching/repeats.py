"""How often samples of a group repeat each other, and how often they would by chance. Numpy only: it knows no model."""

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np

from rollout.types.trajectory import TrajectoryGroup


def sample_repeats(groups: Iterable[TrajectoryGroup]) -> tuple[float, float]:
    """(share of pairs of a group that have the same sampled tokens, the share expected of independent samples), both 0
    without a pair.

    A sample with log-prob l (nats, summed over its tokens) is drawn again with probability e^l, so the mean of e^l over
    samples is what the share of equal pairs tends to, whatever the policy is; a constant seed lies far above it.
    """
    pairs, equal, expected = 0, 0, 0.0
    for group in groups:
        size = len(group.trajectories)
        if size < 2:
            continue
        answers = Counter(one.token_ids[one.sampled].tobytes() for one in group.trajectories)
        pairs += size * (size - 1)
        equal += sum(count * (count - 1) for count in answers.values())
        chances = (float(one.rollout_logprobs.sum(dtype=np.float64)) for one in group.trajectories)
        expected += (size - 1) * math.fsum(math.exp(min(0.0, chance)) for chance in chances)
    return (equal / pairs, expected / pairs) if pairs else (0.0, 0.0)
