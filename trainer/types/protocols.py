"""The seams of the trainer room. Torch is named for the type checker only: importing this module stays cheap."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import Reward

if TYPE_CHECKING:
    from torch import Tensor


class LossInputs(Protocol):
    """What a loss may look at: flat tensors over the N loss tokens of one micro-batch."""

    @property
    def old_logprobs(self) -> "Tensor":
        """[N] nats."""
        ...

    @property
    def advantages(self) -> "Tensor":
        """[N]"""
        ...


class Algorithm(Protocol):
    """A policy-gradient algorithm: advantages from rewards, and a loss term a token. The trainer knows no more of
    it."""

    def advantages(self, rewards: Sequence[Reward]) -> NDArray[np.float32]:
        """[G] advantages of one group's trajectories."""
        ...

    def loss(self, logprobs: "Tensor", inputs: LossInputs) -> "Tensor":
        """[N] loss terms before weights: the step minimises sum(weight x term)."""
        ...
