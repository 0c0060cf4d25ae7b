"""The clipped surrogate that the algorithms share."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import UserError
from rollout.types.trajectory import TrajectoryGroup
from trainer.config.trainer import AlgorithmSection
from trainer.types.loss_tokens import LossTokens


class ClippedSurrogate:
    """Terms -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); an algorithm adds its advantages, and another
    ratio where it has one.

    Source: PPO (arXiv 1707.06347, eq. 7); the two bounds apart as in DAPO (arXiv 2503.14476, eq. 10).
    """

    name: str
    """Its `type` in the config."""
    statistics: tuple[str, ...] = ("clip_fraction_low", "clip_fraction_high")

    def __init__(self, config: AlgorithmSection) -> None:
        self.couples_tokens = config.couples_tokens
        self._bounds = (1.0 - config.clip_low, 1.0 + config.clip_high)

    def log_ratio(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """[N] nats: the log of what is clipped."""
        return logprobs - tokens.old_logprobs

    def loss(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """[N] terms of the clipped surrogate."""
        ratio = torch.exp(self.log_ratio(logprobs, tokens))
        return -torch.minimum(ratio * tokens.advantages, ratio.clamp(*self._bounds) * tokens.advantages)

    def measure(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, ...]:
        """[N] each: 1 where a token is clipped from below, and from above."""
        ratio, (low, high) = torch.exp(self.log_ratio(logprobs, tokens)), self._bounds
        below, above = (ratio < low) & (tokens.advantages < 0), (ratio > high) & (tokens.advantages > 0)
        return below.to(ratio.dtype), above.to(ratio.dtype)

    def rewards(self, group: TrajectoryGroup, reason: str) -> NDArray[np.float64]:
        """[G] rewards of a group whose members are compared.

        Raises:
            UserError: a group of one has nothing to compare, for `reason`.
        """
        if len(group.rewards) < 2:
            raise UserError(
                f"got a group of {len(group.rewards)} trajectory with algorithm {self.name}; {reason}: set group_size "
                "to 2 or more"
            )
        return np.array([reward.total for reward in group.rewards], dtype=np.float64)
