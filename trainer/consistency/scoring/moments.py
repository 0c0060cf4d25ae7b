"""Log-prob of a token together with entropy and variance of log p of the distribution that it was drawn from, in one
pass, chunk by chunk. Pure torch; it knows no model."""

import numpy as np
import torch
from torch import Tensor

from trainer.consistency.scoring.rows import Sampler
from trainer.model.truncation import cut_logits, least_logits
from trainer.types.support import Truncation, support_of


def token_moments(hidden: Tensor, weight: Tensor, targets: Tensor, sampler: Sampler, chunk_tokens: int) -> Tensor:
    """[3, N] of `targets` under the distribution of `sampler`: log-prob, entropy (nats) and variance of log p (squared
    nats), float32 (float64 for float64 inputs), without gradient.

    Args:
        hidden: [N, H] states behind the final norm.
        weight: [V, H] of a head without bias.
        targets: [N] int64 token ids.
        chunk_tokens: rows whose logits exist at once.
    """
    compute = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    head, found = weight.to(compute), hidden.new_empty((3, targets.numel()), dtype=compute)
    declared = Truncation(top_p=sampler.top_p, top_k=sampler.top_k) if sampler.truncates else None
    support = support_of([(declared, np.arange(targets.numel()))])
    for first in range(0, targets.numel(), chunk_tokens):
        rows = slice(first, first + chunk_tokens)
        logits = hidden[rows].to(compute) @ head.t()
        if sampler.temperature != 1.0:
            logits.div_(sampler.temperature)
        chosen = logits.gather(1, targets[rows, None])
        kept = logits
        if support is not None:
            kept = cut_logits(logits, targets[rows], support, rows, least_logits(logits, support, rows))
        normaliser = torch.logsumexp(kept, dim=-1, keepdim=True)
        found[0, rows] = (chosen - normaliser).squeeze(1)
        # What has no probability adds nothing: 0 x -inf would be NaN.
        log_p = (kept - normaliser).clamp_min_(torch.finfo(compute).min / 4)
        p = torch.exp(log_p)
        entropy = -(p * log_p).sum(dim=-1, keepdim=True)
        found[1, rows] = entropy.squeeze(1)
        deviation = log_p.add_(entropy).clamp_min_(-1e18)
        found[2, rows] = p.mul_(deviation).mul_(deviation).sum(dim=-1)
    return found
