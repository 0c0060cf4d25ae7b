"""RLOO: each sample's baseline is the mean reward of the others."""

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import TrajectoryGroup
from trainer.algorithms.surrogate import ClippedSurrogate


class Rloo(ClippedSurrogate):
    """reward - mean of the other samples' rewards. Source: arXiv 2402.14740, eq. 8."""

    name = "rloo"

    def advantages(self, group: TrajectoryGroup) -> NDArray[np.float32]:
        """[G]

        Raises:
            UserError: in a group of one there are no others.
        """
        rewards = self.rewards(group, "its baseline is the others' mean")
        others = (rewards.sum() - rewards) / (rewards.size - 1)
        return (rewards - others).astype(np.float32)
