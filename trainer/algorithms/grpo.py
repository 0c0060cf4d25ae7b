"""GRPO: advantages relative to the group of samples of one prompt."""

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import TrajectoryGroup
from trainer.algorithms.surrogate import ClippedSurrogate
from trainer.config.trainer import GroupRelativeSection


class Grpo(ClippedSurrogate):
    """(reward - mean) / (sample standard deviation + epsilon), or without the division.

    Source: GRPO (arXiv 2402.03300, section 4.1); without the division, Dr. GRPO (arXiv 2503.20783).
    """

    name = "grpo"

    def __init__(self, config: GroupRelativeSection) -> None:
        super().__init__(config)
        self._config = config

    def advantages(self, group: TrajectoryGroup) -> NDArray[np.float32]:
        """[G]; the standard deviation is the sample's (ddof 1).

        Raises:
            UserError: a group of one has no standard deviation.
        """
        rewards = self.rewards(group, "it compares samples of one prompt")
        if rewards.min() == rewards.max():
            return np.zeros(rewards.size, dtype=np.float32)  # the rounding of the mean must not be divided by itself
        centred = rewards - rewards.mean()
        if not self._config.normalize_std:
            return centred.astype(np.float32)
        return (centred / (rewards.std(ddof=1) + self._config.std_epsilon)).astype(np.float32)
