"""The loss of one micro-batch as a sum of weighted token terms, and the sums that the step report needs. It knows no rank and no optimizer."""

from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from trainer.config import AlgorithmConfig
from trainer.policy_model import PolicyModel
from trainer.protocols import Algorithm
from trainer.types import MicroBatch

SUMS = ("loss", "tokens", "entropy", "clipped_low", "clipped_high", "approx_kl", "logprob_difference", "reference_kl")
"""What a micro-batch adds to the step's report, in the order of the sums vector; all but the first are unweighted sums over tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTokens:
    """The N loss tokens of one micro-batch, flat, on the trainer's device."""

    token_ids: Tensor
    """[B, T - 1] what the model reads: the last column predicts nothing."""
    positions: Tensor
    """[N] flat positions in `token_ids` that predict the targets."""
    targets: Tensor
    """[N]"""
    old_logprobs: Tensor
    """[N] nats"""
    advantages: Tensor
    """[N]"""
    weights: Tensor
    """[N]"""


def loss_tokens(micro: MicroBatch, device: torch.device) -> LossTokens:
    """Pick the loss tokens of a micro-batch; token t is predicted at position t - 1."""
    rows, columns = np.nonzero(micro.loss_mask)
    width = micro.token_ids.shape[1] - 1

    def tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return cast(Tensor, cast(Any, torch).from_numpy(np.ascontiguousarray(array))).to(device, non_blocking=True)

    return LossTokens(
        token_ids=tensor(micro.token_ids[:, :-1]),
        positions=tensor(rows * width + columns - 1),
        targets=tensor(micro.token_ids[rows, columns]),
        old_logprobs=tensor(micro.old_logprobs[rows, columns]),
        advantages=tensor(micro.advantages[rows]),
        weights=tensor(micro.token_weights[rows]),
    )


class PolicyLoss:
    """Surrogate + kl_coef x KL to version 0 - entropy_coef x entropy, token by token."""

    def __init__(self, config: AlgorithmConfig, algorithm: Algorithm, reference: PolicyModel | None) -> None:
        self._config, self._algorithm, self._reference = config, algorithm, reference

    def __call__(self, model: PolicyModel, tokens: LossTokens, temperature: float) -> tuple[Tensor, Tensor]:
        """The scalar loss of this micro-batch with its graph, and the float64 vector of `SUMS` without."""
        logprobs, entropies = model(tokens.token_ids, tokens.positions, tokens.targets, temperature)
        terms = self._algorithm.loss(logprobs, tokens)
        reference_kl = torch.zeros_like(logprobs)
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference(tokens.token_ids, tokens.positions, tokens.targets, temperature)
            reference_kl = kl_estimate(logprobs, reference, self._config.kl_estimator)
            terms = terms + self._config.kl_coef * torch.exp(logprobs - tokens.old_logprobs) * reference_kl
        if self._config.entropy_coef > 0:
            terms = terms - self._config.entropy_coef * entropies
        loss = torch.dot(terms, tokens.weights)
        with torch.no_grad():
            return loss, self._sums(loss, logprobs, entropies, reference_kl, tokens)

    def _sums(self, loss: Tensor, logprobs: Tensor, entropies: Tensor, reference_kl: Tensor, tokens: LossTokens) -> Tensor:
        difference = logprobs.detach() - tokens.old_logprobs
        ratio = torch.exp(difference)
        low = (ratio < 1.0 - self._config.clip_low) & (tokens.advantages < 0)
        high = (ratio > 1.0 + self._config.clip_high) & (tokens.advantages > 0)
        approx_kl = ratio - 1.0 - difference
        columns = torch.stack((torch.ones_like(ratio), entropies, low.to(ratio.dtype), high.to(ratio.dtype), approx_kl, difference.abs(), reference_kl))
        return torch.cat((loss.detach().reshape(1).double(), columns.detach().double().sum(dim=1)))


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k3"]) -> Tensor:
    """[N] estimates of KL(policy || reference) from sampled tokens: k1 = log(p/q), k3 = q/p - 1 - log(q/p).

    In the loss each is multiplied by the importance ratio p / p_old. Without it the gradient of k1 averages to nothing, and that of k3 is the
    gradient of the reversed KL; with it both are unbiased, on and off policy.

    Source: http://joschu.net/blog/kl-approx.html; the ratio as in DeepSeek-V3.2 (arXiv 2512.02556, unbiased KL estimate).
    """
    log_ratio = reference - logprobs
    if estimator == "k1":
        return -log_ratio
    return torch.exp(log_ratio) - 1.0 - log_ratio
