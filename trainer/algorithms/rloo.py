"""RLOO: each sample's baseline is the mean reward of the others."""

import numpy as np
from numpy.typing import NDArray

from trainer.algorithms.surrogate import ClippedSurrogate


class Rloo(ClippedSurrogate):
    """reward - mean of the other samples' rewards. Source: arXiv 2402.14740, eq. 8."""

    name = "rloo"
    compares = "its baseline is the others' mean"

    def compared(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Less the mean of the others."""
        return rewards - (rewards.sum() - rewards) / (rewards.size - 1)
