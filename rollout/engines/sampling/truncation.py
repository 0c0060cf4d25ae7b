"""Where a truncating sampler cuts: the one rule of the torch engine, and of whoever computes its log-probs again.

Temperature first, then top-k, then top-p over what top-k left. It knows no model and no request.
"""

import torch
from torch import Tensor

_MOST_OFTEN_ENOUGH = 1024
"""Likeliest tokens that are looked at first where top-p alone decides; all are sorted only where they lack the mass."""


def least_kept(logits: Tensor, top_k: Tensor, top_p: Tensor, widest: int) -> Tensor:
    """[B, 1] the smallest logit that is kept in each row, -inf where all are; those equal to it are kept, too.

    Args:
        logits: [B, V] after temperature.
        top_k: [B, 1] int64, V where it is off.
        top_p: [B, 1], 1 where it is off.
        widest: the largest of `top_k`.
    """
    vocabulary = logits.shape[-1]
    if widest < vocabulary:
        return _least(logits.topk(widest, dim=-1).values, top_k, top_p)
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
    first = logits.topk(min(_MOST_OFTEN_ENOUGH, vocabulary), dim=-1).values
    least = _least(first, top_k, top_p, normaliser)
    everything = (top_k >= vocabulary) & (top_p >= 1.0)
    # Where top-k ends among the first, or they hold the mass, nothing behind them matters.
    holds = (top_k >= vocabulary) & (torch.exp(first - normaliser).sum(dim=-1, keepdim=True) > top_p)
    rest = ~(everything | holds | (top_k <= first.shape[-1])).squeeze(1)
    if bool(rest.any()):
        ordered = logits[rest].sort(dim=-1, descending=True).values
        least[rest] = _least(ordered, top_k[rest], top_p[rest], normaliser[rest])
    return least.masked_fill_(everything, -torch.inf)


def _least(ordered: Tensor, top_k: Tensor, top_p: Tensor, whole: Tensor | None = None) -> Tensor:
    """Of rows [B, n] in falling order, n >= 1; `whole` [B, 1] is the normaliser where top-k keeps more than these n."""
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    outside = rank >= top_k
    normaliser = torch.logsumexp(ordered.masked_fill(outside, -torch.inf), dim=-1, keepdim=True)
    if whole is not None:
        normaliser = torch.where(top_k > ordered.shape[-1], whole, normaliser)
    probabilities = torch.exp(ordered - normaliser)
    before = probabilities.cumsum(dim=-1).sub_(probabilities)
    outside |= (before >= top_p) & (top_p < 1.0)
    outside[:, 0] = False
    return ordered.masked_fill(outside, torch.inf).amin(dim=-1, keepdim=True)
