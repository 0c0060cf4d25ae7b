"""Log-probs under a sampler that draws from the likeliest tokens only, chunk by chunk. Pure torch; it knows no model.

Temperature first, then top-k, then top-p over what top-k left, as the engines do; the rest is renormalised.
"""

import torch
from torch import Tensor

from trainer.consistency.scoring.rows import Sampler


def truncated_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, sampler: Sampler, chunk_tokens: int) -> Tensor:
    """[N] log-probs of `targets` in nats, float32 (float64 for float64 inputs), without gradient.

    Whether a token at the rim was kept hangs on rounding, and the engine did draw it: a target that this computation
    would have cut is added to the tokens that were kept, instead of becoming impossible.

    Args:
        hidden: [N, H] states behind the final norm.
        weight: [V, H] of a head without bias.
        targets: [N] int64 token ids.
        chunk_tokens: rows whose logits exist at once; a quarter of it where all logits of a row must be sorted.

    Source: CONSISTENCY.md, section 4 (log-prob semantics).
    """
    compute = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    head = weight.to(compute)
    logprobs = torch.empty(targets.shape, dtype=compute, device=hidden.device)
    chunk = chunk_tokens if sampler.top_k else max(1, chunk_tokens // 4)
    for first in range(0, targets.numel(), chunk):
        rows = slice(first, first + chunk)
        logits = (hidden[rows].to(compute) @ head.t()).div_(sampler.temperature)
        logprobs[rows] = _logprobs(logits, targets[rows], sampler)
    return logprobs


def kept_logits(logits: Tensor, chosen: Tensor, sampler: Sampler) -> Tensor:
    """[n, K] logits of the tokens that `sampler` can draw, in falling order, -inf elsewhere; where `chosen` [n, 1] lies
    below the rim it is the last column, so that every chosen token is in once."""
    vocabulary = logits.shape[-1]
    top_k = min(sampler.top_k or vocabulary, vocabulary)
    if top_k < vocabulary:
        kept = logits.topk(top_k + 1, dim=-1).values
        kept[:, top_k:] = -torch.inf
    else:
        kept = logits.sort(dim=-1, descending=True).values
    if sampler.top_p < 1.0:
        probabilities = torch.softmax(kept, dim=-1)
        cut = probabilities.cumsum(dim=-1).sub_(probabilities) >= sampler.top_p
        cut[:, 0] = False
        kept = kept.masked_fill(cut, -torch.inf)
    least = torch.where(kept == -torch.inf, torch.inf, kept).amin(dim=-1, keepdim=True)
    kept[:, -1:] = torch.where(chosen >= least, kept[:, -1:], chosen)
    return kept


def _logprobs(logits: Tensor, targets: Tensor, sampler: Sampler) -> Tensor:
    chosen = logits.gather(1, targets[:, None])
    return chosen.squeeze(1) - torch.logsumexp(kept_logits(logits, chosen, sampler), dim=-1)
