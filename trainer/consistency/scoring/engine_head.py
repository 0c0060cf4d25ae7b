"""What an engine's head does otherwise than the trainer's: logits rounded to the compute dtype, and the likeliest token
of each position. Chunk by chunk; pure torch, without gradient."""

import torch
from torch import Tensor


def rounded_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int) -> Tensor:
    """[N] log-probs in nats of `targets` [N], in float32, from logits that were rounded to the dtype of `hidden`
    [N, H] and `weight` [V, H]."""
    logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
    for first in range(0, targets.numel(), chunk_tokens):
        rows = slice(first, first + chunk_tokens)
        logits = (hidden[rows] @ weight.t()).float().div_(temperature)
        logprobs[rows] = logits.gather(1, targets[rows, None]).squeeze(1) - torch.logsumexp(logits, dim=-1)
    return logprobs


def likeliest_tokens(hidden: Tensor, weight: Tensor, chunk_tokens: int) -> Tensor:
    """[N] int64 ids with the largest logit behind each of `hidden` [N, H]; `weight` [V, H]."""
    head = weight.float()
    ids = torch.empty(hidden.shape[:1], dtype=torch.int64, device=hidden.device)
    for first in range(0, ids.numel(), chunk_tokens):
        rows = slice(first, first + chunk_tokens)
        ids[rows] = torch.argmax(hidden[rows].float() @ head.t(), dim=-1)
    return ids
