"""What a correction makes of the loss tokens of a micro-batch: the weights of their terms, and the log-probs that the
surrogate starts from. It knows no model and no algorithm."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.config.consistency import CorrectionConfig, DecoupledConfig, NoCorrection, OpsmConfig
from trainer.loss.corrections import CorrectionInputs, correction_weights, vetoed_tokens
from trainer.types.loss_tokens import LossTokens
from trainer.types.step import OldLogprobSource


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Importance:
    """[N] each, without a graph."""

    policy: Tensor
    """Weight of the algorithm's term; 0 for a token that the correction drops."""
    divergence: Tensor
    """Weight of the KL term, beside the surrogate's bounded ratio."""
    entropy: Tensor
    """Weight of the entropy bonus: 0 in a sequence under a veto, else 1."""
    tokens: LossTokens
    """The tokens with the old log-probs that the surrogate starts from."""

    @property
    def dropped(self) -> Tensor:
        """[N] True where the algorithm's term is not in the loss."""
        return self.policy == 0


def importance_of(
    correction: CorrectionConfig, logprobs: Tensor, tokens: LossTokens, source: OldLogprobSource
) -> Importance:
    """The weights under `correction`, from the log-probs [N] (nats) at the start of the step.

    The KL term is weighted as the algorithm's, so what bounds or drops the one bounds or drops the other. `opsm` alone
    leaves it, as published: it judges an advantage, which the KL term does not have.

    Source: opsm, DeepSeek-V3.2 (arXiv 2512.02556).
    """
    ones = torch.ones_like(logprobs, requires_grad=False)
    if isinstance(correction, NoCorrection) and correction.veto is None:
        return Importance(policy=ones, divergence=ones, entropy=ones, tokens=tokens)
    # Where a log-prob is not finite the loss is not either, and the step is skipped: its weight does not matter.
    now = torch.where(torch.isfinite(logprobs.detach()), logprobs.detach(), tokens.rollout_logprobs)
    decoupled, recomputed = isinstance(correction, DecoupledConfig), source is OldLogprobSource.RECOMPUTED
    # Beside the ratio pi_now / pi_old of the surrogate, the weight is what remains of pi_now / pi_rollout, so that the
    # whole enters once: the engine's part where old log-probs were recomputed; all of it where the surrogate starts
    # from pi_now.
    log_ratio = (tokens.old_logprobs if recomputed and not decoupled else now) - tokens.rollout_logprobs
    from_now = decoupled or (not recomputed and correction.carries_ratio)
    inputs = CorrectionInputs(
        log_ratio=log_ratio,
        rows=tokens.rows,
        num_rows=tokens.token_ids.shape[0],
        advantages=tokens.advantages,
        old_minus_now=tokens.rollout_logprobs - now,
    )
    policy = correction_weights(correction, inputs).to(logprobs.dtype)
    vetoed = vetoed_tokens(correction, inputs)
    left = torch.where(vetoed, torch.zeros_like(ones), ones)
    return Importance(
        policy=policy,
        divergence=left if isinstance(correction, OpsmConfig) else policy,
        entropy=left,
        tokens=replace(tokens, old_logprobs=now) if from_now else tokens,
    )
