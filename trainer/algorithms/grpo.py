"""GRPO: advantages relative to the group of samples of one prompt."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import UserError
from rollout.types.trajectory import Reward
from trainer.algorithms.surrogate import clipped_surrogate
from trainer.config.trainer import GrpoConfig
from trainer.types.protocols import LossInputs


class Grpo:
    """(reward - mean) / (sample standard deviation + epsilon), or without the division.

    Source: GRPO (arXiv 2402.03300, section 4.1); without the division, Dr. GRPO (arXiv 2503.20783).
    """

    def __init__(self, config: GrpoConfig) -> None:
        self._config = config

    def advantages(self, rewards: Sequence[Reward]) -> NDArray[np.float32]:
        """[G]; the standard deviation is the sample's (ddof 1).

        Raises:
            UserError: a group of one has no standard deviation.
        """
        if len(rewards) < 2:
            raise UserError(
                f"got a group of {len(rewards)} trajectory with algorithm grpo; it compares samples of one prompt: set "
                "group_size to 2 or more"
            )
        totals = np.array([reward.total for reward in rewards], dtype=np.float64)
        if totals.min() == totals.max():
            return np.zeros(totals.size, dtype=np.float32)  # the rounding of the mean must not be divided by itself
        centred = totals - totals.mean()
        if not self._config.normalize_std:
            return centred.astype(np.float32)
        return (centred / (totals.std(ddof=1) + self._config.std_epsilon)).astype(np.float32)

    def loss(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        """[N] terms of the clipped surrogate."""
        return clipped_surrogate(logprobs, inputs, self._config.clip_low, self._config.clip_high)
