"""A loss with planted gradient faults. It stands where the real one stands, so a search that evaluates terms again
meets the same faults. It draws nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.faults.gradient_config import RatioSpikeFault
from trainer.batching.batcher import TrainingBatch
from trainer.gradloc.probe.probe import TokenLoss, WrappedLoss
from trainer.model.policy_model import PolicyModel
from trainer.planted.block_gradient import ScaledBlock
from trainer.types.loss_tokens import LossTokens
from trainer.types.step import OldLogprobSource, PlantedFault, StepBatches

_SHIFTS_A_LOGPROB = RatioSpikeFault().type


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlantedStep:
    """A step with what was planted into it."""

    batch: TrainingBatch
    micro_batches: StepBatches
    """The same, packed."""
    planted: tuple[PlantedFault, ...] = ()
    """What was planted, or could not be."""


class PlantedLoss(WrappedLoss):
    """The loss `inner` with gradient faults. What was planted acts until `clear`."""

    def __init__(self, inner: TokenLoss, model: PolicyModel) -> None:
        super().__init__(inner)
        self._model = model
        self._terms: list[tuple[str, int, float]] = []
        """(trajectory, position, factor)"""
        self._factor = 1.0
        self._blocks: dict[str, ScaledBlock] = {}

    def __call__(
        self,
        model: PolicyModel,
        tokens: LossTokens,
        temperature: float,
        source: OldLogprobSource,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The real loss over scaled weights; importance ratios stay as they are."""
        weights = tokens.weights if self._factor == 1.0 else tokens.weights * self._factor
        width = tokens.token_ids.shape[1]
        for trajectory_id, position, factor in self._terms:
            if trajectory_id in tokens.trajectory_ids:
                place = tokens.trajectory_ids.index(trajectory_id) * width + position - 1
                weights = torch.where(tokens.positions == place, weights * factor, weights)
        return self._inner(model, replace(tokens, weights=weights), temperature, source, only)

    def clear(self) -> None:
        self._terms, self._factor = [], 1.0
        for block in self._blocks.values():
            block.clear()

    def plant(self, step: PlantedStep, faults: Sequence[PlantedFault]) -> PlantedStep:
        """Let `faults` act on `step`, besides what acts already; those that were missed do nothing. The step that comes
        back lists all of them."""
        for fault in faults:
            if fault.missed:
                continue
            if fault.fault == _SHIFTS_A_LOGPROB:
                step = _shifted(step, fault)
            elif fault.trajectory_id:
                assert fault.position is not None
                factor = math.nan if fault.factor is None else fault.factor
                self._terms.append((fault.trajectory_id, fault.position, factor))
            elif fault.block:
                self._block(fault.block).scale(_factor(fault))
            else:
                self._factor *= _factor(fault)
        return replace(step, planted=(*step.planted, *faults))

    def _block(self, name: str) -> ScaledBlock:
        """Hooked when it is first hit."""
        if name not in self._blocks:
            self._blocks[name] = ScaledBlock(self._model.named_blocks()[name])
        return self._blocks[name]


def _factor(fault: PlantedFault) -> float:
    assert fault.factor is not None, fault
    return fault.factor


def _shifted(step: PlantedStep, fault: PlantedFault) -> PlantedStep:
    """One rollout log-prob is another, in the sample and in its micro-batch; where the old log-probs are the rollout's,
    they are too."""
    assert fault.rank is not None
    assert fault.micro_batch is not None
    assert fault.position is not None
    shift, micro = _factor(fault), step.micro_batches[fault.rank][fault.micro_batch]
    at = micro.trajectory_ids.index(fault.trajectory_id), fault.position
    both = step.batch.old_logprob_source is OldLogprobSource.ROLLOUT
    ranks = [list(micro_batches) for micro_batches in step.micro_batches]
    rollout = _plus(micro.rollout_logprobs, at, shift)
    ranks[fault.rank][fault.micro_batch] = replace(
        micro, rollout_logprobs=rollout, old_logprobs=rollout if both else micro.old_logprobs
    )
    samples = list(step.batch.samples)
    for index, sample in enumerate(samples):
        if sample.trajectory_id == fault.trajectory_id:
            rollout = _plus(sample.rollout_logprobs, fault.position, shift)
            samples[index] = replace(
                sample, rollout_logprobs=rollout, old_logprobs=rollout if both else sample.old_logprobs
            )
    return replace(step, batch=replace(step.batch, samples=tuple(samples)), micro_batches=ranks)


def _plus(logprobs: NDArray[np.float32], at: int | tuple[int, int], shift: float) -> NDArray[np.float32]:
    changed = logprobs.copy()
    changed[at] += np.float32(shift)
    return changed
