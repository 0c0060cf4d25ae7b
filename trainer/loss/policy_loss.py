"""The loss of one micro-batch as a sum of weighted token terms, and the sums that the step report needs. It knows no
rank and no optimizer."""

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from trainer.config.consistency import (
    CorrectionConfig,
    DecoupledConfig,
    GeoRsConfig,
    IcePopConfig,
    MisSequenceConfig,
    MisTokenConfig,
    NoCorrection,
    OpsmConfig,
    SeqClipConfig,
    TisConfig,
)
from trainer.config.trainer import AlgorithmConfig
from trainer.loss.corrections import CorrectionInputs, correction_weights
from trainer.loss.ratio_buckets import RATIO_SUMS, ratio_sums
from trainer.model.policy_model import PolicyModel
from trainer.types.protocols import Algorithm
from trainer.types.step import MicroBatch, OldLogprobSource

SUMS = (
    *("loss", "tokens", "entropy", "clipped_low", "clipped_high", "approx_kl", "logprob_difference", "reference_kl"),
    *(
        "rollout_difference",
        "engine_difference",
        "weight",
        "weight_squared",
        "weight_zero",
        "reference_k1",
        "reference_k3",
    ),
    *RATIO_SUMS,
)
"""What a micro-batch adds to the step's report, in the order of the sums vector; all but the first are unweighted sums
over tokens."""


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
    rollout_logprobs: Tensor
    """[N] nats"""
    advantages: Tensor
    """[N]"""
    weights: Tensor
    """[N]"""
    rows: Tensor
    """[N] row of each token in the micro-batch: which sequence it belongs to."""
    trajectory_ids: tuple[str, ...] = ()
    """[B] whose tokens each row holds."""

    def only(self, chosen: Tensor) -> "LossTokens":
        """Some of them, by index; the model still reads the same rows."""
        names = ("positions", "targets", "old_logprobs", "rollout_logprobs", "advantages", "weights", "rows")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})


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
        rollout_logprobs=tensor(micro.rollout_logprobs[rows, columns]),
        advantages=tensor(micro.advantages[rows]),
        weights=tensor(micro.token_weights[rows]),
        rows=tensor(rows),
        trajectory_ids=micro.trajectory_ids,
    )


_WEIGHTING = (TisConfig, IcePopConfig, MisTokenConfig, MisSequenceConfig)
"""Corrections whose weight is the ratio itself; the others only keep or drop."""


class PolicyLoss:
    """Importance weight x surrogate + kl_coef x KL to version 0 - entropy_coef x entropy, token by token."""

    def __init__(
        self, config: AlgorithmConfig, algorithm: Algorithm, reference: PolicyModel | None, correction: CorrectionConfig
    ) -> None:
        self._config, self._algorithm, self._reference = config, algorithm, reference
        self._correction = correction
        self._corrects = not isinstance(correction, NoCorrection) or correction.veto is not None

    @property
    def couples_tokens(self) -> bool:
        """Whether a token's importance weight depends on the other loss tokens of its sequence."""
        return self._correction.veto is not None or isinstance(
            self._correction, (MisSequenceConfig, SeqClipConfig, GeoRsConfig, OpsmConfig)
        )

    def __call__(
        self,
        model: PolicyModel,
        tokens: LossTokens,
        temperature: float,
        source: OldLogprobSource,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The scalar loss of this micro-batch with its graph, and the float64 vector of `SUMS` without.

        Args:
            only: indices into the N tokens: the others count for the importance weights, and have no term.
        """
        logprobs, entropies = model(tokens.token_ids, tokens.positions, tokens.targets, temperature)
        importance, proximal = self._importance(logprobs, tokens, source)
        if only is not None:
            logprobs, entropies, tokens, proximal = (
                logprobs[only],
                entropies[only],
                tokens.only(only),
                proximal.only(only),
            )
            importance = None if importance is None else importance[only]
        surrogate = self._algorithm.loss(logprobs, proximal)
        surrogate, importance = (
            (surrogate, torch.ones_like(logprobs)) if importance is None else (importance * surrogate, importance)
        )
        terms, reference_kl, reference = surrogate, torch.zeros_like(logprobs), None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference(tokens.token_ids, tokens.positions, tokens.targets, temperature)
            reference_kl = kl_estimate(logprobs, reference, self._config.kl_estimator)
            terms = terms + self._config.kl_coef * torch.exp(logprobs - tokens.old_logprobs) * reference_kl
        if self._config.entropy_coef > 0:
            terms = terms - self._config.entropy_coef * entropies
        loss = torch.dot(terms, tokens.weights)
        with torch.no_grad():
            return loss, self._sums(loss, logprobs, entropies, reference_kl, importance, tokens, reference)

    def _importance(
        self, logprobs: Tensor, tokens: LossTokens, source: OldLogprobSource
    ) -> tuple[Tensor | None, LossTokens]:
        """[N] importance weights, None where all are 1; and the tokens with the log-probs that the surrogate starts
        from."""
        if not self._corrects:
            return None, tokens
        # Where a log-prob is not finite the loss is not either, and the step is skipped: its weight does not matter.
        now = torch.where(torch.isfinite(logprobs.detach()), logprobs.detach(), tokens.rollout_logprobs)
        decoupled, recomputed = isinstance(self._correction, DecoupledConfig), source is OldLogprobSource.RECOMPUTED
        # Beside the ratio pi_now / pi_old of the surrogate, the weight is what remains of pi_now / pi_rollout, so that
        # the whole enters once: the engine's part where old log-probs were recomputed; all of it where the surrogate
        # starts from pi_now.
        log_ratio = (tokens.old_logprobs if recomputed and not decoupled else now) - tokens.rollout_logprobs
        from_now = decoupled or (not recomputed and isinstance(self._correction, _WEIGHTING))
        inputs = CorrectionInputs(
            log_ratio=log_ratio,
            rows=tokens.rows,
            num_rows=tokens.token_ids.shape[0],
            advantages=tokens.advantages,
            old_minus_now=tokens.old_logprobs - now,
        )
        importance = correction_weights(self._correction, inputs).to(logprobs.dtype)
        return importance, replace(tokens, old_logprobs=now) if from_now else tokens

    def _sums(
        self,
        loss: Tensor,
        logprobs: Tensor,
        entropies: Tensor,
        reference_kl: Tensor,
        importance: Tensor,
        tokens: LossTokens,
        reference: Tensor | None,
    ) -> Tensor:
        difference = logprobs.detach() - tokens.old_logprobs
        ratio, total, engine = (
            torch.exp(difference),
            logprobs.detach() - tokens.rollout_logprobs,
            tokens.old_logprobs - tokens.rollout_logprobs,
        )
        from_reference = [
            torch.zeros_like(ratio) if reference is None else kl_estimate(logprobs, reference, estimator)
            for estimator in ("k1", "k3")
        ]
        low = (ratio < 1.0 - self._config.clip_low) & (tokens.advantages < 0)
        high = (ratio > 1.0 + self._config.clip_high) & (tokens.advantages > 0)
        columns = (
            *(
                torch.ones_like(ratio),
                entropies,
                low.to(ratio.dtype),
                high.to(ratio.dtype),
                ratio - 1.0 - difference,
                difference.abs(),
                reference_kl,
            ),
            *(
                total.abs(),
                engine.abs(),
                importance,
                importance.square(),
                (importance == 0).to(ratio.dtype),
                *from_reference,
            ),
        )
        sums = torch.stack(columns).detach().double().sum(dim=1)
        return torch.cat((loss.detach().reshape(1).double(), sums, ratio_sums((total, engine, difference))))


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
