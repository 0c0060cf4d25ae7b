"""GRPO: advantages relative to the group of samples of one prompt."""

import numpy as np
from numpy.typing import NDArray

from trainer.algorithms.surrogate import ClippedSurrogate
from trainer.config.trainer import GroupRelativeSection


class Grpo(ClippedSurrogate):
    """(reward - mean) / (sample standard deviation + epsilon), or without the division.

    Source: GRPO (arXiv 2402.03300, section 4.1); without the division, Dr. GRPO (arXiv 2503.20783).
    """

    name = "grpo"
    compares = "it compares samples of one prompt"

    def __init__(self, config: GroupRelativeSection) -> None:
        super().__init__(config)
        self._config = config

    def compared(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """The standard deviation is the sample's (ddof 1)."""
        centred = rewards - rewards.mean()
        return centred / (rewards.std(ddof=1) + self._config.std_epsilon) if self._config.normalize_std else centred
