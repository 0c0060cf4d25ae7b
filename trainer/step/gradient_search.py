"""The gradient search on a live step: watches it, reads the culprits of a spike, says which terms the step is better
without. It applies nothing."""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from trainer.batching.batcher import TrainingBatch
from trainer.config.gradloc import GradLocConfig
from trainer.gradloc.block_history import BlockHistory
from trainer.gradloc.culprits import CulpritReader
from trainer.gradloc.gradloc import GradLoc, GradLocReport, StepSigns, TermPlace, without_terms, without_trajectories
from trainer.gradloc.probe.backward_record import BackwardRecord
from trainer.gradloc.probe.probe import Context, StepData, TokenLoss
from trainer.gradloc.probe.random_states import RandomState
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks
from trainer.optim.optimizer import GradientNorms
from trainer.types.evidence import AuditedGroup
from trainer.types.gradloc import Acted, GradLocEvidence, Outcome
from trainer.types.step import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attempt:
    """One forward and backward pass of a whole step. Numbers run over all ranks; micro-batches and random states are
    this rank's."""

    micro_batches: Sequence[MicroBatch]
    totals: Mapping[str, float]
    """As `trainer.step.gradient_step.GradientReport.totals`."""
    norms: GradientNorms
    """Unclipped."""
    random_states: Sequence[RandomState]
    """Before each micro-batch; empty where the model draws no random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """What a search found in an attempt."""

    evidence: GradLocEvidence
    micro_batches: Sequence[MicroBatch] | None
    """This rank's, without the terms that the step shall be computed again without; None where it is not computed
    again."""
    removed: Mapping[str, int]
    """Trajectory -> terms that left the loss, over all ranks."""


class GradientSearch:
    """One rank's part; every rank calls it alike."""

    def __init__(
        self,
        config: GradLocConfig,
        model: PolicyModel,
        loss: TokenLoss,
        ranks: Ranks,
        *,
        context: Context,
        dtype: torch.dtype,
    ) -> None:
        """`loss` is what the step computes; forward and backward of a micro-batch run inside `context`, in `dtype`."""
        self._config, self._ranks, self._context = config, ranks, context
        self._gradloc = GradLoc(config, model, loss, ranks, dtype=dtype)
        self._record = BackwardRecord(model, ranks, part_norms=config.part_norms, term_pulls=config.term_pulls)
        self._blocks = BlockHistory()
        self._reader = CulpritReader(config, model, ranks, self._blocks, context)

    def backward(self, micro_batch: int) -> AbstractContextManager[None]:
        """The backward pass of this micro-batch of an attempt runs inside."""
        return self._record.recording(micro_batch)

    def look(
        self, attempt: Attempt, batch: TrainingBatch, audited: Sequence[AuditedGroup], smallest_scale: float
    ) -> Found | None:
        """Search the attempt if something asks for it. Collective; gradients and random state stay as they are, bit for
        bit.

        Args:
            smallest_scale: by which the clip is about to scale a block.
        """
        started = perf_counter()
        suspects = {
            sample.trajectory_id: [at for at in sample.suspects if sample.loss_mask[at]]
            for sample in batch.samples
            if sample.suspects
        }
        data = StepData(
            micro_batches=attempt.micro_batches,
            temperature=batch.temperature,
            source=batch.old_logprob_source,
            random_states=attempt.random_states,
            context=self._context,
        )
        signs = StepSigns(
            loss=attempt.totals["loss"],
            smallest_scale=smallest_scale,
            weight_square=batch.weight_square,
            num_suspects=sum(len(positions) for positions in suspects.values()),
        )
        places = _places(attempt.micro_batches, suspects)
        report = self._gradloc.observe(attempt.norms.total, data, suspects=places, record=self._record, signs=signs)
        if report is None:
            return None
        culprits = self._reader.read(report.hits, batch, audited)
        evidence = GradLocEvidence(
            **replace(report, seconds=perf_counter() - started).facts(),
            action=self._config.action,
            acted=Acted.NOTHING,
            loss=attempt.totals["loss"],
            culprits=culprits,
        )
        return self._decided(report, evidence, attempt.micro_batches, batch)

    def amend(self, attempt: Attempt | None, batch: TrainingBatch, removed: Mapping[str, int]) -> None:
        """What the last `look` saw was not applied, but `attempt` without some terms, or nothing at all."""
        if attempt is None:
            self._gradloc.amend()
            return
        weights = {sample.trajectory_id: sample.token_weight for sample in batch.samples}
        gone = math.fsum(count * weights[trajectory_id] ** 2 for trajectory_id, count in removed.items())
        self._gradloc.amend(attempt.norms.total, batch.weight_square - gone)

    def applied(self, norms: GradientNorms) -> None:
        """A step with these norms is applied: they are the usual ones from now on."""
        self._blocks.remember(norms.blocks)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs, as JSON."""
        return {"gradloc": self._gradloc.state(), "blocks": self._blocks.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._gradloc.load_state(state["gradloc"])
        self._blocks.load_state(state["blocks"])

    def _decided(
        self,
        report: GradLocReport,
        evidence: GradLocEvidence,
        micro_batches: Sequence[MicroBatch],
        batch: TrainingBatch,
    ) -> Found:
        """Only located culprits are the cause: nothing is done for less."""
        if report.outcome is not Outcome.LOCATED or self._config.action == "observe":
            return Found(evidence=evidence, micro_batches=None, removed={})
        if self._config.action == "skip":
            return Found(evidence=replace(evidence, acted=Acted.SKIPPED), micro_batches=None, removed={})
        ids = {hit.trajectory_id for hit in report.hits}
        if self._config.action == "mask":
            removed = {
                trajectory_id: sum(hit.trajectory_id == trajectory_id for hit in report.hits)
                for trajectory_id in sorted(ids)
            }
            acted, left = Acted.MASKED, without_terms(micro_batches, report.hits, self._ranks.rank)
        else:
            removed = {
                sample.trajectory_id: int(np.count_nonzero(sample.loss_mask))
                for sample in batch.samples
                if sample.trajectory_id in ids
            }
            acted, left = Acted.QUARANTINED, without_trajectories(micro_batches, ids)
        evidence = replace(evidence, acted=acted, removed_terms=sum(removed.values()))
        return Found(evidence=evidence, micro_batches=left, removed=removed)


def _places(micro_batches: Sequence[MicroBatch], suspects: Mapping[str, Sequence[int]]) -> list[TermPlace]:
    """Suspects of this rank, where they stand in its micro-batches."""
    if not suspects:
        return []
    rows = [
        (m, row, trajectory_id)
        for m, micro in enumerate(micro_batches)
        for row, trajectory_id in enumerate(micro.trajectory_ids)
    ]
    return [
        TermPlace(micro_batch=m, row=row, position=at)
        for m, row, trajectory_id in rows
        for at in suspects.get(trajectory_id, ())
    ]
