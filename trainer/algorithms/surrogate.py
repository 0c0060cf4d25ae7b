"""The clipped surrogate that the algorithms share."""

import torch
from torch import Tensor

from trainer.types.protocols import LossInputs


def clipped_surrogate(logprobs: Tensor, inputs: LossInputs, clip_low: float, clip_high: float) -> Tensor:
    """[N] terms -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(logprobs - old).

    Source: PPO (arXiv 1707.06347, eq. 7); the two bounds apart as in DAPO (arXiv 2503.14476, eq. 10).
    """
    ratio = torch.exp(logprobs - inputs.old_logprobs)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
