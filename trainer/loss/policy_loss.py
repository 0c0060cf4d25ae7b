"""The loss of one micro-batch as a sum of weighted token terms, and the sums that the step report needs. It knows no
rank and no optimizer."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trainer.config.consistency import CorrectionConfig, DecoupledConfig, NoCorrection
from trainer.config.trainer import AlgorithmConfig
from trainer.loss.corrections import CorrectionInputs, correction_weights
from trainer.loss.kl_estimate import kl_estimate
from trainer.loss.token_sums import TOKEN_SUMS, Measured, token_sums
from trainer.model.policy_model import PolicyModel
from trainer.types.loss_tokens import LossTokens
from trainer.types.protocols import Algorithm
from trainer.types.step import MicroBatch, OldLogprobSource


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
        advantages=tensor(micro.advantages[rows, columns]),
        weights=tensor(micro.token_weights[rows]),
        rows=tensor(rows),
        trajectory_ids=micro.trajectory_ids,
    )


class PolicyLoss:
    """Importance weight x the algorithm's term + kl_coef x KL to version 0 - entropy_coef x entropy, token by token."""

    def __init__(
        self, config: AlgorithmConfig, algorithm: Algorithm, reference: PolicyModel | None, correction: CorrectionConfig
    ) -> None:
        self._config, self._algorithm, self._reference = config, algorithm, reference
        self._correction = correction
        self._corrects = not isinstance(correction, NoCorrection) or correction.veto is not None
        self.sums: tuple[str, ...] = ("loss", *TOKEN_SUMS, *algorithm.statistics)
        """What a micro-batch adds to the step's report; all but the first are unweighted sums over tokens."""

    @property
    def couples_tokens(self) -> bool:
        """Whether a token's term or importance weight depends on the other loss tokens of its sequence."""
        correction = self._correction
        return self._algorithm.couples_tokens or correction.couples_tokens or correction.veto is not None

    def __call__(
        self,
        model: PolicyModel,
        tokens: LossTokens,
        temperature: float,
        source: OldLogprobSource,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The scalar loss of this micro-batch with its graph, and the float64 vector of `sums` without.

        Args:
            only: indices into the N tokens: the loss is the sum of their terms alone, each as it is among all N; the
                sums are those of all N.
        """
        logprobs, entropies = model(tokens.token_ids, tokens.positions, tokens.targets, temperature)
        if only is not None:  # the gradient of another token's term must not reach the model, be it NaN
            logprobs, entropies = _graph_only(logprobs, only), _graph_only(entropies, only)
        importance, proximal = self._importance(logprobs, tokens, source)
        terms = self._algorithm.loss(logprobs, proximal)
        terms = terms if importance is None else importance * terms
        reference, reference_kl = logprobs.detach(), torch.zeros_like(logprobs)
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference(tokens.token_ids, tokens.positions, tokens.targets, temperature)
            reference_kl = kl_estimate(logprobs, reference, self._config.kl_estimator)
            terms = terms + self._config.kl_coef * torch.exp(logprobs - tokens.old_logprobs) * reference_kl
        if self._config.entropy_coef > 0:
            terms = terms - self._config.entropy_coef * entropies
        weights = tokens.weights
        loss = torch.dot(terms, weights) if only is None else torch.dot(terms[only], weights[only])
        with torch.no_grad():
            measured = Measured(
                tokens=tokens,
                logprobs=logprobs,
                entropies=entropies,
                importance=torch.ones_like(logprobs) if importance is None else importance,
                reference_kl=reference_kl,
                reference=reference,
            )
            sums = token_sums(measured, self._algorithm.measure(logprobs, tokens))
            return loss, torch.cat((loss.reshape(1).double(), sums))

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
        from_now = decoupled or (not recomputed and self._correction.carries_ratio)
        inputs = CorrectionInputs(
            log_ratio=log_ratio,
            rows=tokens.rows,
            num_rows=tokens.token_ids.shape[0],
            advantages=tokens.advantages,
            old_minus_now=tokens.old_logprobs - now,
        )
        importance = correction_weights(self._correction, inputs).to(logprobs.dtype)
        return importance, replace(tokens, old_logprobs=now) if from_now else tokens


def _graph_only(values: Tensor, only: Tensor) -> Tensor:
    """The same [N] values, with a graph at these indices alone."""
    return values.detach().index_copy(0, only, values[only])
