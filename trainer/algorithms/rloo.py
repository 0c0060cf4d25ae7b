"""RLOO: each sample's baseline is the mean reward of the others."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import UserError
from rollout.types.trajectory import Reward
from trainer.algorithms.surrogate import clipped_surrogate
from trainer.config.trainer import RlooConfig
from trainer.types.protocols import LossInputs


class Rloo:
    """reward - mean of the other samples' rewards. Source: arXiv 2402.14740, eq. 8."""

    def __init__(self, config: RlooConfig) -> None:
        self._config = config

    def advantages(self, rewards: Sequence[Reward]) -> NDArray[np.float32]:
        """[G]

        Raises:
            UserError: in a group of one there are no others.
        """
        if len(rewards) < 2:
            raise UserError(
                f"got a group of {len(rewards)} trajectory with algorithm rloo; its baseline is the others' mean: set "
                "group_size to 2 or more"
            )
        totals = np.array([reward.total for reward in rewards], dtype=np.float64)
        others = (totals.sum() - totals) / (totals.size - 1)
        return (totals - others).astype(np.float32)

    def loss(self, logprobs: Tensor, inputs: LossInputs) -> Tensor:
        """[N] terms of the clipped surrogate."""
        return clipped_surrogate(logprobs, inputs, self._config.clip_low, self._config.clip_high)
