"""The loss of one micro-batch as a sum of weighted token terms, and the sums that the step report needs. It knows no
rank and no optimizer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trainer.config.consistency import CorrectionConfig
from trainer.config.trainer import AlgorithmConfig
from trainer.loss.importance import Importance, importance_of
from trainer.loss.kl_estimate import kl_estimate
from trainer.loss.token_sums import TOKEN_SUMS, Measured, token_sums
from trainer.model.policy_model import PolicyModel
from trainer.types.loss_tokens import LossTokens
from trainer.types.protocols import Algorithm
from trainer.types.step import MicroBatch, OldLogprobSource
from trainer.types.support import Support, support_of


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
        support=_support(micro),
    )


def _support(micro: MicroBatch) -> Support | None:
    """Of the loss tokens, row by row."""
    rows = zip(micro.truncations, micro.loss_mask, strict=bool(micro.truncations))
    return support_of([(truncation, np.flatnonzero(mask)) for truncation, mask in rows])


class PolicyLoss:
    """Importance weight x the algorithm's term + kl_coef x weight x KL to version 0 - entropy_coef x entropy, token by
    token. The KL term's weight is the importance weight times the surrogate's ratio, bounded as there, so it is nowhere
    larger than that of the policy's own term may be; a sequence under a veto has none of the three."""

    def __init__(
        self, config: AlgorithmConfig, algorithm: Algorithm, reference: PolicyModel | None, correction: CorrectionConfig
    ) -> None:
        self._config, self._algorithm, self._reference = config, algorithm, reference
        self._correction = correction
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
        logprobs, entropies = model(tokens.token_ids, tokens.positions, tokens.targets, temperature, tokens.support)
        if only is not None:  # the gradient of another token's term must not reach the model, be it NaN
            logprobs, entropies = _graph_only(logprobs, only), _graph_only(entropies, only)
        importance = importance_of(self._correction, logprobs, tokens, source)
        terms = self._policy_terms(logprobs, importance)
        reference, reference_kl = logprobs.detach(), torch.zeros_like(logprobs)
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference(
                    tokens.token_ids, tokens.positions, tokens.targets, temperature, tokens.support
                )
            reference_kl = kl_estimate(logprobs.detach(), reference, self._config.kl_estimator)
            terms = terms + self._config.kl_coef * self._divergence_terms(logprobs, reference, importance)
        if self._config.entropy_coef > 0:
            terms = terms - self._config.entropy_coef * importance.entropy * entropies
        weights = tokens.weights
        loss = torch.dot(terms, weights) if only is None else torch.dot(terms[only], weights[only])
        with torch.no_grad():
            measured = Measured(
                tokens=tokens,
                logprobs=logprobs,
                entropies=entropies,
                importance=importance.policy,
                reference_kl=reference_kl,
                reference=reference,
            )
            sums = token_sums(measured, self._measured(logprobs, importance))
            return loss, torch.cat((loss.reshape(1).double(), sums))

    def _policy_terms(self, logprobs: Tensor, importance: Importance) -> Tensor:
        """[N] weighted terms of the algorithm; exactly 0, as is their gradient, for a token that is dropped, however
        far its ratio is out: 0 times what overflows would be NaN."""
        dropped = importance.dropped
        terms = importance.policy * self._algorithm.loss(_cut(logprobs, dropped), importance.tokens)
        return torch.where(dropped, torch.zeros_like(terms), terms)

    def _divergence_terms(self, logprobs: Tensor, reference: Tensor, importance: Importance) -> Tensor:
        """[N] weighted estimates of the KL to version 0. A weight's value is bounded, and its gradient is that of the
        unbounded ratio times this value: weight x (estimate + its derivative)."""
        now = logprobs.detach()
        weights = importance.divergence * self._algorithm.bounded_ratio(now, importance.tokens)
        dropped = weights == 0
        estimates = kl_estimate(_cut(logprobs, dropped), reference, self._config.kl_estimator)
        terms = weights * torch.exp(logprobs - now) * estimates
        return torch.where(dropped, torch.zeros_like(terms), terms)

    def _measured(self, logprobs: Tensor, importance: Importance) -> Sequence[Tensor]:
        """What the algorithm measures of the ratio that its terms have; the surrogate clips nothing where a token is
        dropped, so there it sees no advantage."""
        tokens = importance.tokens
        advantages = torch.where(importance.dropped, torch.zeros_like(tokens.advantages), tokens.advantages)
        return self._algorithm.measure(logprobs, replace(tokens, advantages=advantages))


def _cut(values: Tensor, where: Tensor) -> Tensor:
    """The same [N] values, without a graph where `where` is True: no gradient comes through there, be it NaN."""
    return torch.where(where, values.detach(), values)


def _graph_only(values: Tensor, only: Tensor) -> Tensor:
    """The same [N] values, with a graph at these indices alone."""
    return values.detach().index_copy(0, only, values[only])
