"""Cuts the logits of a chunk to the support of its tokens. Whoever computes log-probs of sampled tokens cuts here: the
loss, its reference, the scorer, the gradient search. It knows no model and no batch."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engines.sampling.truncation import least_kept
from trainer.types.support import Support

_SORTED_SHARE = 4
"""Of a chunk's rows so large a part is sorted at a time: values, their places and probabilities exist beside them."""


def least_logits(logits: Tensor, support: Support, rows: slice) -> Tensor:
    """[n] the smallest logit of each row that is kept for its size: infinite where the ids are listed instead, minus
    infinity where nothing was cut.

    Args:
        logits: [n, V] after temperature, of the tokens `rows` of `support`.
    """
    size, vocabulary = logits.shape
    counts, top_p = support.listed.counts[rows], support.top_p[rows]
    top_k = np.where(support.top_k[rows] > 0, np.minimum(support.top_k[rows], vocabulary), vocabulary)
    least = _on(np.where(counts > 0, np.inf, -np.inf), logits).to(logits.dtype)
    recomputed = np.flatnonzero((counts == 0) & ((top_p < 1.0) | (top_k < vocabulary)))
    step = max(1, size // _SORTED_SHARE)
    for some in (recomputed[first : first + step] for first in range(0, recomputed.size, step)):
        here = _on(some, logits)
        k, p = _on(top_k[some, None], logits), _on(top_p[some, None], logits).to(logits.dtype)
        least[here] = least_kept(logits[here], k, p, int(top_k[some].max())).squeeze(1)
    return least


def cut_logits(logits: Tensor, targets: Tensor, support: Support, rows: slice, least: Tensor) -> Tensor:
    """The same logits, in place, -inf outside the support; a row's target is always inside.

    Raises:
        ValueError: a listed id is outside the vocabulary.
    """
    outside = logits < least[:, None]
    first, last, _ = rows.indices(support.listed.counts.size)
    listed = support.listed.cut(first, last)
    if listed.ids.size:
        lowest, highest = int(listed.ids.min()), int(listed.ids.max())
        if lowest < 0 or highest >= logits.shape[-1]:
            raise ValueError(
                f"a sampler kept ids from {lowest} to {highest}; the model knows 0 to {logits.shape[-1] - 1}: expected "
                "the model that sampled"
            )
        lines = np.repeat(np.arange(listed.counts.size), listed.counts)
        outside[_on(lines, logits), _on(listed.ids.astype(np.int64), logits)] = False
    outside.scatter_(1, targets[:, None], value=False)
    return logits.masked_fill_(outside, -torch.inf)


def _on(array: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.as_tensor(array, device=like.device)
