"""Estimates of a KL divergence from sampled tokens."""

from typing import Literal

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Literal["k1", "k3"]) -> Tensor:
    """[N] estimates of KL(policy || reference) from sampled tokens: k1 = log(p/q), k3 = q/p - 1 - log(q/p).

    In the loss each is multiplied by the importance ratio p / p_old. Without it the gradient of k1 averages to nothing,
    and that of k3 is the gradient of the reversed KL; with it both are unbiased, on and off policy.

    Source: http://joschu.net/blog/kl-approx.html; the ratio as in DeepSeek-V3.2 (arXiv 2512.02556, unbiased KL
    estimate).
    """
    log_ratio = reference - logprobs
    if estimator == "k1":
        return -log_ratio
    return torch.exp(log_ratio) - 1.0 - log_ratio
