"""What a micro-batch adds to the step's report: sums over its tokens, none of them weighted by the loss's weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.loss.kl_estimate import kl_estimate
from trainer.loss.ratio_buckets import RATIO_SUMS, ratio_sums
from trainer.types.loss_tokens import LossTokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measured:
    """The N loss tokens of a micro-batch under the weights of the step; [N] each, without a graph."""

    tokens: LossTokens
    logprobs: Tensor
    """Nats."""
    entropies: Tensor
    """Nats."""
    importance: Tensor
    """Weights of the correction."""
    reference_kl: Tensor
    """By the configured estimator, nats; 0 without a reference."""
    reference: Tensor
    """Log-probs of version 0, nats; those of now without a reference."""

    @property
    def total(self) -> Tensor:
        """log pi_now - rollout."""
        return self.logprobs - self.tokens.rollout_logprobs

    @property
    def engine(self) -> Tensor:
        """old - rollout."""
        return self.tokens.old_logprobs - self.tokens.rollout_logprobs

    @property
    def stale(self) -> Tensor:
        """log pi_now - old."""
        return self.logprobs - self.tokens.old_logprobs


_COLUMNS: Mapping[str, Callable[[Measured], Tensor]] = {
    "tokens": lambda m: torch.ones_like(m.logprobs),
    "entropy": lambda m: m.entropies,
    "approx_kl": lambda m: kl_estimate(m.tokens.old_logprobs.double(), m.logprobs.double(), "k3"),
    "logprob_difference": lambda m: m.stale.abs(),
    "reference_kl": lambda m: m.reference_kl,
    "rollout_difference": lambda m: m.total.abs(),
    "engine_difference": lambda m: m.engine.abs(),
    "weight": lambda m: m.importance,
    "weight_squared": lambda m: m.importance.double().square(),
    "weight_zero": lambda m: (m.importance == 0).to(m.importance.dtype),
    "reference_k1": lambda m: kl_estimate(m.logprobs, m.reference, "k1"),
    "reference_k3": lambda m: kl_estimate(m.logprobs.double(), m.reference.double(), "k3"),
}
TOKEN_SUMS = (*_COLUMNS, *RATIO_SUMS)
"""Names of what every algorithm's tokens are summed up by."""


def token_sums(measured: Measured, statistics: Sequence[Tensor]) -> Tensor:
    """[len(TOKEN_SUMS) + len(statistics)] float64, in that order; `statistics` are [N] each."""
    columns = [column(measured) for column in _COLUMNS.values()]
    sums = torch.stack([values.double() for values in (*columns, *statistics)]).sum(dim=1)
    buckets = ratio_sums((measured.total, measured.engine, measured.stale))
    return torch.cat((sums[: len(columns)], buckets, sums[len(columns) :]))
