"""The gradient faults of a run that a step is due: measured, drawn, planted and reported. A fault that would not show
is reported as missed, and does nothing.

faults due -> terms that have a gradient (a forward pass, in such a step only) -> draw -> `PlantedLoss`
"""

from dataclasses import replace

import numpy as np

from rollout.errors import UserError
from rollout.faults.config import FaultsConfig
from rollout.faults.gradient_config import (
    BlockExplosionFault,
    DiffuseSpikeFault,
    GradientFault,
    NanTokenFault,
    RatioSpikeFault,
    TermFault,
    TwoSpikesFault,
)
from trainer.batching.batcher import TrainingBatch
from trainer.gradloc.probe.probe import TokenLoss
from trainer.model.policy_model import PolicyModel
from trainer.planted.draws import DrawnTerm, StepPulls, candidates, draw_terms, generator
from trainer.planted.loss import PlantedLoss, PlantedStep
from trainer.planted.pull_meter import PullMeter
from trainer.types.step import MicroBatch, OldLogprobSource, PlantedFault, StepBatches

_NO_GRADIENT = "no term of the step has a gradient: all advantages are 0, or the clip has cut off every ratio"
_ONE_PART = "all terms with a gradient stand in one micro-batch of one rank, and it needs two"
_NO_RATIO = "no token of the step has a negative advantage and a ratio that the clip would not cut off"
_NO_TOKEN = "the step has no loss token"
_UNUSED = "old log-probs are recomputed and no correction uses the rollout's"


class DueFaults:
    """One rank's part; every rank has one and calls it alike."""

    def __init__(
        self,
        faults: FaultsConfig,
        loss: PlantedLoss,
        model: PolicyModel,
        meter: PullMeter,
        *,
        real: TokenLoss,
        uncorrected: TokenLoss,
        corrects: bool,
    ) -> None:
        """Plant `faults.in_gradients` into `loss`.

        Args:
            real: the loss that it wraps.
            uncorrected: the same without importance weights.
            corrects: whether a correction compares log-probs with the rollout's.

        Raises:
            UserError: a fault names a block that the model does not have.
        """
        self._faults, self._loss, self._meter, self._corrects = faults, loss, meter, corrects
        self._real, self._uncorrected = real, uncorrected
        self._done: set[tuple[int, int]] = set()
        self._block_names = tuple(model.named_blocks())
        explosions = [fault for fault in faults.in_gradients if isinstance(fault, BlockExplosionFault)]
        beyond = [fault.block for fault in explosions if (fault.block or 0) >= len(self._block_names)]
        if beyond:
            number = len(self._block_names)
            raise UserError(
                f"fault block_explosion: got block = {beyond[0]}, but the model has {number} transformer blocks; set 0 "
                f"to {number - 1}"
            )

    def begin(self, version: int, batch: TrainingBatch, step: StepBatches) -> PlantedStep:
        """Plant what is due in the step that produces `version`, which trains on `batch`, packed as `step`; it acts
        until the next `begin`. Collective."""
        self._loss.clear()
        planted = PlantedStep(batch=batch, micro_batches=step)
        due = [
            (i, fault)
            for i, fault in enumerate(self._faults.in_gradients)
            if fault.hits(version) and (i, version) not in self._done
        ]
        self._done.update((index, version) for index, _ in due)
        rngs = {index: generator(self._faults.seed, fault.type, index, version) for index, fault in due}
        # Those that shift log-probs come first: whether a term has a gradient depends on them.
        for index, fault in due:
            if isinstance(fault, RatioSpikeFault):
                planted = self._loss.plant(planted, self._shift(fault, planted, rngs[index]))
        others = [(index, fault) for index, fault in due if not isinstance(fault, RatioSpikeFault)]
        if others:
            pulls = self._meter.pulls(self._real, batch, planted.micro_batches)
            for index, fault in others:
                planted = self._loss.plant(planted, self._scaled(fault, planted, pulls, rngs[index]))
        return planted

    def _shift(self, fault: RatioSpikeFault, step: PlantedStep, rng: np.random.Generator) -> tuple[PlantedFault, ...]:
        """What a correction takes out of the loss again is planted: to do that is what a correction is there for."""
        source = step.batch.old_logprob_source
        if source is OldLogprobSource.RECOMPUTED and not self._corrects:
            return (PlantedFault(fault=fault.type, missed=_UNUSED),)
        shifted = step.micro_batches
        # Without weights terms know nothing of each other, so all can be measured at once.
        if source is OldLogprobSource.ROLLOUT:
            shifted = [
                [_with_old_shifted(micro, fault.shift_nats) for micro in micro_batches]
                for micro_batches in step.micro_batches
            ]
        return _drawn(fault, step.micro_batches, self._meter.pulls(self._uncorrected, step.batch, shifted), rng)

    def _scaled(
        self, fault: GradientFault, step: PlantedStep, pulls: StepPulls, rng: np.random.Generator
    ) -> tuple[PlantedFault, ...]:
        if not isinstance(fault, DiffuseSpikeFault | BlockExplosionFault):
            return _drawn(fault, step.micro_batches, pulls, rng)
        if not any(pull.any() for of_rank in pulls for pull in of_rank):
            return (PlantedFault(fault=fault.type, missed=_NO_GRADIENT),)
        if isinstance(fault, DiffuseSpikeFault):
            return (PlantedFault(fault=fault.type, factor=fault.factor),)
        number = int(rng.integers(len(self._block_names))) if fault.block is None else fault.block
        return (PlantedFault(fault=fault.type, factor=fault.factor, block=self._block_names[number]),)


def _with_old_shifted(micro: MicroBatch, shift: float) -> MicroBatch:
    return replace(
        micro, old_logprobs=np.where(micro.loss_mask, micro.old_logprobs + np.float32(shift), micro.old_logprobs)
    )


def _drawn(fault: TermFault, step: StepBatches, pulls: StepPulls, rng: np.random.Generator) -> tuple[PlantedFault, ...]:
    tokens = candidates(fault, step, pulls)
    drawn = draw_terms(fault, step, tokens, rng)
    if not drawn:
        there = any(allowed.any() for of_rank in tokens for allowed in of_rank)
        return (PlantedFault(fault=fault.type, missed=_why_none(fault, there=there)),)
    return tuple(_planted(fault, step, term) for term in drawn)


def _why_none(fault: TermFault, *, there: bool) -> str:
    match fault:
        case TwoSpikesFault() if there:
            return _ONE_PART
        case NanTokenFault():
            return _NO_TOKEN
        case RatioSpikeFault():
            return _NO_RATIO
        case _:
            return _NO_GRADIENT


def _planted(fault: TermFault, step: StepBatches, term: DrawnTerm) -> PlantedFault:
    plain = None if isinstance(fault, NanTokenFault | RatioSpikeFault) else fault.factor
    factor = fault.shift_nats if isinstance(fault, RatioSpikeFault) else plain
    return PlantedFault(
        fault=fault.type,
        factor=factor,
        trajectory_id=step[term.rank][term.micro_batch].trajectory_ids[term.row],
        position=term.position,
        micro_batch=term.micro_batch,
        rank=term.rank,
    )
