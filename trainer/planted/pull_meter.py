"""How hard each token term of a step pulls, before the step runs: which terms have a gradient that a planted fault
could scale. It knows no fault."""

from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.batching.batcher import TrainingBatch
from trainer.gradloc.probe.probe import Context, TokenLoss
from trainer.loss.policy_loss import loss_tokens
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, reshard
from trainer.planted.draws import StepPulls
from trainer.types.step import MicroBatch, StepBatches
from trainer.types.support import Support


class PullMeter:
    """One rank's part; every rank has one and calls it alike."""

    def __init__(self, model: PolicyModel, ranks: Ranks, context: Context | None = None) -> None:
        """Forward passes run inside `context`, as those of the step do."""
        self._model, self._ranks, self._context = model, ranks, context

    def pulls(self, loss: TokenLoss, batch: TrainingBatch, step: StepBatches) -> StepPulls:
        """|d loss / d (the token's own logit)| of every term of `step`, from a forward pass that leaves no gradient; 0
        where it is not finite. Collective."""
        flat = torch.zeros(_num_terms(step), dtype=torch.float64, device=self._ranks.device)
        start = _num_terms(step[: self._ranks.rank])
        for micro in step[self._ranks.rank]:
            pulls = self._of_micro_batch(loss, batch, micro)
            flat[start : start + pulls.numel()] = pulls
            start += pulls.numel()
        reshard(self._model)
        return _placed(step, cast(NDArray[np.float64], self._ranks.sum(flat).cpu().numpy()))

    def _of_micro_batch(self, loss: TokenLoss, batch: TrainingBatch, micro: MicroBatch) -> Tensor:
        leaves = _Leaves(self._model)
        with nullcontext() if self._context is None else self._context(micro):
            tokens = loss_tokens(micro, self._ranks.device)
            total, _ = loss(cast(PolicyModel, leaves), tokens, batch.temperature, batch.old_logprob_source)
        total.backward()  # pyright: ignore[reportUnknownMemberType]
        return leaves.pulls()


def _num_terms(step: StepBatches) -> int:
    return sum(int(np.count_nonzero(micro.loss_mask)) for micro_batches in step for micro in micro_batches)


def _placed(step: StepBatches, flat: NDArray[np.float64]) -> StepPulls:
    """Values of all terms, in the order of ranks, micro-batches and tokens, where the tokens stand."""
    placed: list[list[NDArray[np.float64]]] = []
    start = 0
    for micro_batches in step:
        placed.append([])
        for micro in micro_batches:
            values, stop = np.zeros(micro.loss_mask.shape), start + int(np.count_nonzero(micro.loss_mask))
            values[micro.loss_mask] = flat[start:stop]
            placed[-1].append(values)
            start = stop
    return placed


class _Leaves:
    """Stands where the model stands, and a backward pass ends at what it returns."""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model

    def __call__(
        self, token_ids: Tensor, positions: Tensor, targets: Tensor, temperature: float, support: Support | None = None
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            logprobs, entropies = self._model(token_ids, positions, targets, temperature, support)
        self._logprobs, self._entropies = logprobs.detach().requires_grad_(), entropies.detach().requires_grad_()
        return self._logprobs, self._entropies

    def pulls(self) -> Tensor:
        """d log p_t / d z_t = 1 - p_t and d H / d z_t = -p_t (log p_t + H)."""
        logprobs, entropies = self._logprobs.detach().double(), self._entropies.detach().double()
        pull = torch.zeros_like(logprobs)
        if self._logprobs.grad is not None:
            pull -= self._logprobs.grad * torch.expm1(logprobs)
        if self._entropies.grad is not None:
            pull -= self._entropies.grad * torch.exp(logprobs) * (logprobs + entropies)
        return cast(Any, torch).nan_to_num(pull.abs(), nan=0.0, posinf=0.0)
