"""Draws tokens from logits: temperature, truncation, inverse CDF over counter-based uniforms. It knows no model."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.types.generation import SamplingParams

_BITS = 52


def uniforms(key: int, first: int, count: int) -> NDArray[np.float64]:
    """Numbers [first, first + count) of the stream of the sampling key `key`, strictly between 0 and 1.

    Number i depends on the key and on i alone (Philox 4x64, keyed and counted), so a sample's randomness is independent
    of its batch. 52 bits and a half keep every number so far below 1 that its product with a sum of probabilities stays
    below that sum.
    """
    raw = np.random.Philox(key=key).random_raw(first + count)[first:]
    return ((raw >> np.uint64(64 - _BITS)).astype(np.float64) + 0.5) * 2.0**-_BITS


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of the rows of a batch."""

    temperature: Tensor
    """[B, 1] float32"""
    top_p: Tensor | None
    """[B, 1] float32; None when no row truncates."""
    top_k: Tensor | None
    """[B, 1] int64, the vocabulary's size where off; None when no row truncates."""

    @classmethod
    def of(cls, rows: list[SamplingParams], vocab_size: int, device: torch.device) -> "RowSampling":
        """Gather the parameters of `rows`."""
        temperature = torch.tensor([[row.temperature] for row in rows], dtype=torch.float32, device=device)
        if all(row.top_p == 1.0 and row.top_k == 0 for row in rows):
            return cls(temperature, None, None)
        top_p = torch.tensor([[row.top_p] for row in rows], dtype=torch.float32, device=device)
        top_k = torch.tensor([[row.top_k or vocab_size] for row in rows], dtype=torch.int64, device=device)
        return cls(temperature, top_p, top_k)

    def processed_logprobs(self, logits: Tensor) -> Tensor:
        """[B, V] log-probs after temperature, then top-k, then top-p over what top-k left; -inf where truncated."""
        scaled = logits.float() / self.temperature
        if self.top_p is None or self.top_k is None:
            return torch.log_softmax(scaled, dim=-1)
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(ordered.shape[-1], device=logits.device)
        ordered = ordered.masked_fill(rank >= self.top_k, -torch.inf)
        probs = torch.softmax(ordered, dim=-1)
        before = probs.cumsum(dim=-1) - probs
        ordered = ordered.masked_fill((before >= self.top_p) & (rank > 0), -torch.inf)
        return torch.log_softmax(torch.empty_like(scaled).scatter_(-1, order, ordered), dim=-1)


def draw(logits: Tensor, sampling: RowSampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row by inverse CDF.

    Args:
        logits: [B, V].
        sampling: the parameters of these B rows.
        uniform: [B, 1] float64 in (0, 1).

    Returns:
        [B] int64 tokens, and [B] float32 log-probs of the distribution that was sampled from, in nats.
    """
    logprobs = sampling.processed_logprobs(logits)
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
