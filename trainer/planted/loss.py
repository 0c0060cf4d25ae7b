"""A loss with planted gradient faults. It stands where the real one stands, so a search that evaluates terms again meets the same faults."""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import UserError
from rollout.faults.config import FaultsConfig
from rollout.faults.gradient_config import (
    BlockExplosionFault,
    DiffuseSpikeFault,
    GradientFault,
    NanTokenFault,
    RatioSpikeFault,
    TermFault,
)
from trainer.batcher import TrainingBatch
from trainer.planted.block_gradient import ScaledBlock
from trainer.planted.draws import DrawnTerm, StepBatches, draw_terms, generator
from trainer.policy_loss import LossTokens
from trainer.policy_model import PolicyModel
from trainer.stability.gradient_probe import TokenLoss
from trainer.types import OldLogprobSource, PlantedFault

_NO_TERM = "the step has no such token: too few micro-batches, or all advantages are 0 (of ratio_spike, none is negative)"


@dataclass(frozen=True, slots=True)
class _ScaledTerm:
    trajectory_id: str
    position: int
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlantedStep:
    """A step with what was planted into it."""

    batch: TrainingBatch
    micro_batches: StepBatches
    """The same, packed."""
    planted: tuple[PlantedFault, ...] = ()
    """What was planted, or could not be."""

    def told(self, *planted: PlantedFault) -> "PlantedStep":
        """The same step with more to tell."""
        return replace(self, planted=(*self.planted, *planted))


class PlantedLoss:
    """The loss `inner` with the gradient faults of a run. Call `begin` before each step; the faults act until the next `begin`."""

    def __init__(self, inner: TokenLoss, model: PolicyModel, faults: FaultsConfig, *, corrects: bool) -> None:
        """Plant `faults.in_gradients`.

        Args:
            corrects: whether a correction compares log-probs with the rollout's.

        Raises:
            UserError: a fault names a block that the model does not have.
        """
        self._inner, self._faults, self._corrects = inner, faults, corrects
        self._done: set[tuple[int, int]] = set()
        self._terms: list[_ScaledTerm] = []
        self._factor = 1.0
        self._block_names = tuple(model.named_blocks())
        wanted = {fault.block for fault in faults.in_gradients if isinstance(fault, BlockExplosionFault)}
        beyond = [block for block in wanted if block is not None and block >= len(self._block_names)]
        if beyond:
            number = len(self._block_names)
            raise UserError(f"fault block_explosion: got block = {beyond[0]}, but the model has {number} transformer blocks; set 0 to {number - 1}")
        self._blocks = [ScaledBlock(block) for block in model.blocks()] if wanted else []

    @property
    def couples_tokens(self) -> bool:
        """As the real loss."""
        return self._inner.couples_tokens

    def __call__(
        self, model: PolicyModel, tokens: LossTokens, temperature: float, source: OldLogprobSource, only: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The real loss over scaled weights; importance ratios stay as they are."""
        weights = tokens.weights if self._factor == 1.0 else tokens.weights * self._factor
        width = tokens.token_ids.shape[1]
        for term in self._terms:
            if term.trajectory_id in tokens.trajectory_ids:
                place = tokens.trajectory_ids.index(term.trajectory_id) * width + term.position - 1
                weights = torch.where(tokens.positions == place, weights * term.factor, weights)
        return self._inner(model, replace(tokens, weights=weights), temperature, source, only)

    def begin(self, version: int, batch: TrainingBatch, step: StepBatches) -> PlantedStep:
        """Draw what is hit in the step that produces `version`, which trains on `batch`, packed as `step`; it makes no difference which rank asks."""
        self._terms, self._factor = [], 1.0
        for block in self._blocks:
            block.factor = 1.0
        planted = PlantedStep(batch=batch, micro_batches=step)
        for index, fault in enumerate(self._faults.in_gradients):
            if fault.hits(version) and (index, version) not in self._done:
                self._done.add((index, version))
                planted = self._plant(fault, planted, generator(self._faults.seed, fault.type, index, version))
        return planted

    def _plant(self, fault: GradientFault, step: PlantedStep, rng: np.random.Generator) -> PlantedStep:
        if isinstance(fault, DiffuseSpikeFault):
            self._factor *= fault.factor
            return step.told(PlantedFault(fault=fault.type, factor=fault.factor))
        if isinstance(fault, BlockExplosionFault):
            number = int(rng.integers(len(self._blocks))) if fault.block is None else fault.block
            self._blocks[number].factor = fault.factor
            return step.told(PlantedFault(fault=fault.type, factor=fault.factor, block=self._block_names[number]))
        if isinstance(fault, RatioSpikeFault) and step.batch.old_logprob_source is OldLogprobSource.RECOMPUTED and not self._corrects:
            return step.told(PlantedFault(fault=fault.type, missed="old log-probs are recomputed and no correction uses the rollout's"))
        drawn = draw_terms(fault, step.micro_batches, rng)
        if not drawn:
            return step.told(PlantedFault(fault=fault.type, missed=_NO_TERM))
        told = [_told(fault, step.micro_batches, term) for term in drawn]
        if isinstance(fault, RatioSpikeFault):
            return _shifted(step, drawn[0], fault.shift_nats).told(*told)
        factor = math.nan if isinstance(fault, NanTokenFault) else fault.factor
        self._terms += [_ScaledTerm(_trajectory(step.micro_batches, term), term.position, factor) for term in drawn]
        return step.told(*told)


def _told(fault: TermFault, step: StepBatches, term: DrawnTerm) -> PlantedFault:
    factor = None if isinstance(fault, NanTokenFault) else fault.shift_nats if isinstance(fault, RatioSpikeFault) else fault.factor
    return PlantedFault(
        fault=fault.type,
        factor=factor,
        trajectory_id=_trajectory(step, term),
        position=term.position,
        micro_batch=term.micro_batch,
        rank=term.rank,
    )


def _trajectory(step: StepBatches, term: DrawnTerm) -> str:
    return step[term.rank][term.micro_batch].trajectory_ids[term.row]


def _shifted(step: PlantedStep, term: DrawnTerm, shift: float) -> PlantedStep:
    """One rollout log-prob is another, in the sample and in its micro-batch; where the old log-probs are the rollout's, they are too."""
    at, micro = (term.row, term.position), step.micro_batches[term.rank][term.micro_batch]
    trajectory_id, both = micro.trajectory_ids[term.row], step.batch.old_logprob_source is OldLogprobSource.ROLLOUT
    ranks = [list(micro_batches) for micro_batches in step.micro_batches]
    rollout = _plus(micro.rollout_logprobs, at, shift)
    ranks[term.rank][term.micro_batch] = replace(micro, rollout_logprobs=rollout, old_logprobs=rollout if both else micro.old_logprobs)
    samples = list(step.batch.samples)
    for index, sample in enumerate(samples):
        if sample.trajectory_id == trajectory_id:
            rollout = _plus(sample.rollout_logprobs, term.position, shift)
            samples[index] = replace(sample, rollout_logprobs=rollout, old_logprobs=rollout if both else sample.old_logprobs)
    return replace(step, batch=replace(step.batch, samples=tuple(samples)), micro_batches=ranks)


def _plus(logprobs: NDArray[np.float32], at: int | tuple[int, int], shift: float) -> NDArray[np.float32]:
    changed = logprobs.copy()
    changed[at] += np.float32(shift)
    return changed
