"""Draws tokens from logits: temperature, truncation, inverse CDF over counter-based uniforms; and says what each draw
kept. It knows no model."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engines.sampling.truncation import least_kept
from rollout.types.generation import SamplingParams
from rollout.types.supports import SUPPORT_LIMIT

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
    widest: int
    """The largest of `top_k`."""

    @classmethod
    def of(cls, rows: list[SamplingParams], vocab_size: int, device: torch.device) -> "RowSampling":
        """Gather the parameters of `rows`."""
        temperature = torch.tensor([[row.temperature] for row in rows], dtype=torch.float32, device=device)
        if not any(row.truncates for row in rows):
            return cls(temperature, None, None, vocab_size)
        top_p = torch.tensor([[row.top_p] for row in rows], dtype=torch.float32, device=device)
        widths = [min(row.top_k or vocab_size, vocab_size) for row in rows]
        top_k = torch.tensor([[width] for width in widths], dtype=torch.int64, device=device)
        return cls(temperature, top_p, top_k, max(widths))

    def processed_logprobs(self, logits: Tensor) -> Tensor:
        """[B, V] log-probs after temperature, then top-k, then top-p over what top-k left (`least_kept`); -inf where
        truncated."""
        scaled = logits.float() / self.temperature
        if self.top_p is None or self.top_k is None:
            return torch.log_softmax(scaled, dim=-1)
        least = least_kept(scaled, self.top_k, self.top_p, self.widest)
        return torch.log_softmax(scaled.masked_fill_(scaled < least, -torch.inf), dim=-1)

    def kept(self, logprobs: Tensor) -> list[list[int]]:
        """What `processed_logprobs` [B, V] leaves in reach: the ids of each row, likeliest first; none of a row that
        keeps more than `SUPPORT_LIMIT`."""
        width = min(SUPPORT_LIMIT + 1, logprobs.shape[-1])
        values, ids = logprobs.topk(width, dim=-1)
        counts = (values > -torch.inf).sum(dim=-1)
        counts[counts > SUPPORT_LIMIT] = 0
        rows, lengths = (cast(Any, each).tolist() for each in (ids, counts))
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def draw(logits: Tensor, sampling: RowSampling, uniform: Tensor) -> tuple[Tensor, Tensor, list[list[int]] | None]:
    """One token a row by inverse CDF.

    Args:
        logits: [B, V].
        sampling: the parameters of these B rows.
        uniform: [B, 1] float64 in (0, 1).

    Returns:
        [B] int64 tokens, and [B] float32 log-probs of the distribution that was sampled from, in nats; and where some
        row truncates, what each row kept (`RowSampling.kept`).
    """
    logprobs = sampling.processed_logprobs(logits)
    cumulative = logprobs.double().exp_().cumsum(dim=-1)
    tokens = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    kept = None if sampling.top_k is None else sampling.kept(logprobs)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1), kept
