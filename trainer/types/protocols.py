"""The seams of the trainer room. Torch is named for the type checker only: importing this module stays cheap."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import TrajectoryGroup
from trainer.types.loss_tokens import LossTokens

if TYPE_CHECKING:
    from torch import Tensor

Advantages = NDArray[np.float32] | Sequence[NDArray[np.float32]]
"""Advantages of a group of G trajectories: [G], one for each; or G arrays [T], one for each token of the trajectory."""


class Algorithm(Protocol):
    """A policy-gradient algorithm: advantages from rewards, and a loss term for each token. The trainer knows no more
    of it.

    The step minimises sum(weight x term) over all tokens of the batch with fixed weights, so the gradient is a sum over
    tokens, on any number of ranks and however the batch is packed. A term may read the other tokens of its sequence,
    but its gradient must go through its own token's log-prob alone.
    """

    @property
    def couples_tokens(self) -> bool:
        """Whether a term depends on the other loss tokens of its sequence. The gradient search then runs whole
        sequences, and the term of a token is the one that it has among all loss tokens of its sequence."""
        ...

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of what `measure` returns; the step report has each one's mean over the loss's tokens."""
        ...

    def advantages(self, group: TrajectoryGroup) -> Advantages:
        """Advantages of one group's trajectories, in their order; what is outside the loss counts for nothing."""
        ...

    def loss(self, logprobs: "Tensor", tokens: LossTokens) -> "Tensor":
        """[N] loss terms before weights, from the log-probs [N] (nats, with a graph) under the weights of the step."""
        ...

    def bounded_ratio(self, logprobs: "Tensor", tokens: LossTokens) -> "Tensor":
        """[N] the importance ratio that its terms are multiplied by, at most as large as the loss lets it grow where it
        pushes a token up. The KL term is multiplied by it; no graph is kept."""
        ...

    def measure(self, logprobs: "Tensor", tokens: LossTokens) -> "Sequence[Tensor]":
        """[N] a statistic, in the order of `statistics`; no graph is kept. The tokens are as the loss sees them: with
        the old log-probs that its ratio starts from, and advantage 0 where a correction drops a token."""
        ...
