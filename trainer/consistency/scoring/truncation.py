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


def _logprobs(logits: Tensor, targets: Tensor, sampler: Sampler) -> Tensor:
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    vocabulary = logits.shape[-1]
    top_k = min(sampler.top_k or vocabulary, vocabulary)
    kept = logits.topk(top_k, dim=-1).values if top_k < vocabulary else logits.sort(dim=-1, descending=True).values
    if sampler.top_p < 1.0:
        probabilities = torch.softmax(kept, dim=-1)
        cut = probabilities.cumsum(dim=-1).sub_(probabilities) >= sampler.top_p
        cut[:, 0] = False
        kept = kept.masked_fill(cut, -torch.inf)
    normaliser = torch.logsumexp(kept, dim=-1)
    least = torch.where(kept == -torch.inf, torch.inf, kept).amin(dim=-1)
    return chosen - torch.where(chosen >= least, normaliser, torch.logaddexp(normaliser, chosen))
