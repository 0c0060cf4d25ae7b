"""Log-probabilities and entropies of chosen tokens from hidden states, without ever holding [N, V] logits.

Forward and backward walk the tokens in chunks; backward computes a chunk's logits again. All of it is float32 (float64
for float64 inputs). With a support, the distribution is that over the support alone: what lies outside has probability
0 and takes no gradient, and which tokens those are is a constant for the gradient. This module knows no model and no
batch.
"""

from typing import Any, cast

import torch
from torch import Tensor

from trainer.model.truncation import cut_logits, least_logits
from trainer.types.support import Support

_IMPOSSIBLE_NATS = -1e4
"""Stands for the log-prob of tokens whose probability is 0 in every format, so that products with it stay finite."""


class _ChunkedLogprobs(torch.autograd.Function):
    """(hidden [N, H], weight [V, H], targets [N]) -> (log-prob [N], entropy [N]) of softmax(hidden weight^T /
    temperature)."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        support: Support | None,
    ) -> tuple[Tensor, Tensor]:
        compute = _compute_dtype(hidden)
        head = weight.to(compute)
        logprobs = torch.empty(targets.shape, dtype=compute, device=hidden.device)
        entropies, normalisers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        least = None if support is None else torch.empty_like(logprobs)
        for start in range(0, targets.numel(), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = _logits(hidden[rows].to(compute), head, temperature)
            if support is not None and least is not None:
                least[rows] = least_logits(logits, support, rows)
                cut_logits(logits, targets[rows], support, rows, least[rows])
            normaliser = torch.logsumexp(logits, dim=-1)
            torch.sub(logits.gather(1, targets[rows, None]).squeeze(1), normaliser, out=logprobs[rows])
            probabilities = torch.exp(logits - normaliser[:, None])
            # The terms of impossible tokens are 0: 0 x -inf would be NaN.
            expected = probabilities.mul_(logits.clamp_min(torch.finfo(compute).min)).sum(dim=-1)
            torch.sub(normaliser, expected, out=entropies[rows])
            normalisers[rows] = normaliser
        ctx.save_for_backward(hidden, weight, targets, normalisers, entropies, least)
        ctx.temperature, ctx.chunk_tokens, ctx.support = temperature, chunk_tokens, support
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        *grads: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, normalisers, entropies, least = ctx.saved_tensors
        logprob_grad, entropy_grad = grads
        if logprob_grad is None and entropy_grad is None:
            return None, None, None, None, None, None
        compute = _compute_dtype(hidden)
        head = weight.to(compute)
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.zeros_like(head)
        for start in range(0, targets.numel(), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            inputs = hidden[rows].to(compute)
            logits = _logits(inputs, head, ctx.temperature)
            if ctx.support is not None:
                cut_logits(logits, targets[rows], ctx.support, rows, least[rows])
            log_softmax = logits.sub_(normalisers[rows, None])
            slopes = _logit_slopes(
                log_softmax,
                targets[rows],
                None if logprob_grad is None else logprob_grad[rows],
                None if entropy_grad is None else entropy_grad[rows],
                entropies[rows],
            )
            if ctx.temperature != 1.0:
                slopes.div_(ctx.temperature)
            hidden_grad[rows] = (slopes @ head).to(hidden.dtype)
            head_grad.addmm_(slopes.t(), inputs)
        return hidden_grad, head_grad.to(weight.dtype), None, None, None, None


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    support: Support | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, in nats, at `temperature`.

    Whether a token at the rim of a support that is not listed was kept hangs on rounding, and the engine did draw the
    target: a target that this computation would have cut joins the kept ones, instead of becoming impossible.

    Args:
        hidden: [N, H] states behind the final norm.
        weight: [V, H] of a head without bias.
        targets: [N] int64 token ids.
        temperature: logits are divided by it.
        chunk_tokens: rows whose logits exist at once.
        support: of the targets; None: every token of the vocabulary was in reach.

    Returns:
        [N] and [N], float32 (float64 for float64 inputs); both are differentiable in hidden and weight.

    Source: CONSISTENCY.md, section 4 (log-prob semantics).
    """
    apply = cast(Any, _ChunkedLogprobs).apply
    return apply(hidden, weight, targets, temperature, chunk_tokens, support)


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    logits = hidden @ head.t()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _logit_slopes(
    log_softmax: Tensor, targets: Tensor, logprob_grad: Tensor | None, entropy_grad: Tensor | None, entropies: Tensor
) -> Tensor:
    """[n, V] d(loss)/d(logit / temperature): d logp_t / d z_j = [j = t] - p_j and dH / d z_j = -p_j (log p_j + H)."""
    probabilities = torch.exp(log_softmax)
    if entropy_grad is None:
        assert logprob_grad is not None
        slopes = probabilities.mul_(-logprob_grad[:, None])
    else:
        factor = (log_softmax + entropies[:, None]).clamp_min_(_IMPOSSIBLE_NATS).mul_(entropy_grad[:, None])
        if logprob_grad is not None:
            factor += logprob_grad[:, None]
        slopes = probabilities.mul_(factor).neg_()
    if logprob_grad is not None:
        slopes.scatter_add_(1, targets[:, None], logprob_grad[:, None])
    return slopes
