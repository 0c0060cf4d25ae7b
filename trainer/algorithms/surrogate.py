"""The clipped surrogate that the algorithms share."""

import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import UserError
from rollout.types.trajectory import TrajectoryGroup, rewards_alike
from trainer.config.trainer import AlgorithmSection
from trainer.types.loss_tokens import LossTokens


class ClippedSurrogate(ABC):
    """Terms -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); an algorithm adds how the rewards of a group
    compare, and another ratio where it has one.

    Source: PPO (arXiv 1707.06347, eq. 7); the two bounds apart as in DAPO (arXiv 2503.14476, eq. 10).
    """

    name: str
    """Its `type` in the config."""
    compares: str
    """What it needs two trajectories for; an error says so."""
    statistics: tuple[str, ...] = ("clip_fraction_low", "clip_fraction_high")

    def __init__(self, config: AlgorithmSection) -> None:
        self.couples_tokens = config.couples_tokens
        low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
        self._bounds = (low, high)
        self._log_bounds = (math.log(low) if low > 0 else -math.inf, math.log(high))

    def log_ratio(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """[N] nats: the log of what is clipped."""
        return logprobs - tokens.old_logprobs

    def loss(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """[N] terms of the clipped surrogate. Where a token is clipped or has no advantage the gradient is exactly 0,
        however large the ratio: nothing is exponentiated there, since 0 times what overflows would be NaN."""
        log_ratio, advantages = self.log_ratio(logprobs, tokens), tokens.advantages
        below, above = self._clipped(log_ratio, advantages)
        constant = below | above | ((advantages == 0) & torch.isfinite(log_ratio))
        ratio = torch.exp(log_ratio.masked_fill(constant, 0.0))
        low, high = self._bounds
        return -(ratio.masked_fill(below, low).masked_fill(above, high) * advantages)

    def bounded_ratio(self, logprobs: Tensor, tokens: LossTokens) -> Tensor:
        """[N] values of the ratio, at most what the surrogate clips at; none is lifted to the lower bound."""
        return torch.exp(self.log_ratio(logprobs, tokens).clamp(max=self._log_bounds[1]))

    def measure(self, logprobs: Tensor, tokens: LossTokens) -> tuple[Tensor, ...]:
        """[N] each: 1 where a token is clipped from below, and from above."""
        below, above = self._clipped(self.log_ratio(logprobs, tokens), tokens.advantages)
        return below.to(logprobs.dtype), above.to(logprobs.dtype)

    def _clipped(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """[N] True where a token is clipped from below, and from above."""
        low, high = self._log_bounds
        return (log_ratio < low) & (advantages < 0), (log_ratio > high) & (advantages > 0)

    def advantages(self, group: TrajectoryGroup) -> NDArray[np.float32]:
        """[G]; exactly 0 for all where the rewards are alike: what rounding leaves of their difference is no signal.

        Raises:
            UserError: a group of one has nothing to compare.
        """
        if len(group.rewards) < 2:
            raise UserError(
                f"got a group of {len(group.rewards)} trajectory with algorithm {self.name}; {self.compares}: set "
                "group_size to 2 or more"
            )
        rewards = np.array([reward.total for reward in group.rewards], dtype=np.float64)
        if rewards_alike(rewards):
            return np.zeros(rewards.size, dtype=np.float32)
        return self.compared(rewards).astype(np.float32)

    @abstractmethod
    def compared(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """[G] advantages from [G] rewards, two or more, that are not all alike."""
