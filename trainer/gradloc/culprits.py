"""Everything that is known of the tokens that a search found: one forward pass of each culprit's row, and what its
trajectory says. Layer 3 of diagnosis."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.types.trajectory import Trajectory
from trainer.batching.batcher import TrainingBatch
from trainer.batching.packing import micro_batch_of
from trainer.config.gradloc import GradLocConfig
from trainer.gradloc.block_history import BlockHistory
from trainer.gradloc.gradloc import GradLocHit
from trainer.gradloc.probe.probe import Context
from trainer.gradloc.probe.random_states import RandomState
from trainer.loss.policy_loss import loss_tokens
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, reshard
from trainer.types.evidence import AuditedGroup, TrajectoryEvidence
from trainer.types.gradloc import Culprit, CulpritType
from trainer.types.step import TrainingSample

CONTEXT_TOKENS = 20
"""On either side of a culprit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """The loss tokens of one trajectory under the present weights."""

    logprobs: Mapping[int, float]
    """By position, nats."""
    entropies: Mapping[int, float]
    sequence_ratio: float


class CulpritReader:
    """One rank's part: every rank reads every culprit itself, since every rank has every sample."""

    def __init__(
        self, config: GradLocConfig, model: PolicyModel, ranks: Ranks, history: BlockHistory, context: Context
    ) -> None:
        """Forward passes run inside `context`."""
        self._config, self._model, self._ranks, self._history, self._context = config, model, ranks, history, context

    def read(
        self, hits: Sequence[GradLocHit], batch: TrainingBatch, audited: Sequence[AuditedGroup]
    ) -> tuple[Culprit, ...]:
        """Describe the hits of a search in this batch. Collective; neither gradients nor random state change."""
        samples = {sample.trajectory_id: sample for sample in batch.samples}
        wanted = tuple(dict.fromkeys(hit.trajectory_id for hit in hits))
        random = RandomState.take(self._ranks.device)
        rows = {trajectory_id: self._forward(samples[trajectory_id], batch.temperature) for trajectory_id in wanted}
        random.put_back(self._ranks.device)
        found = {
            trajectory.trajectory_id: (
                trajectory,
                None if group.evidence is None else group.evidence.trajectories[index],
            )
            for group in audited
            for index, trajectory in enumerate(group.group.trajectories)
            if trajectory.trajectory_id in rows
        }
        return tuple(
            self._culprit(hit, samples[hit.trajectory_id], rows[hit.trajectory_id], *found[hit.trajectory_id])
            for hit in hits
        )

    def _forward(self, sample: TrainingSample, temperature: float) -> _Row:
        micro = micro_batch_of([sample])
        tokens = loss_tokens(micro, self._ranks.device)
        with torch.no_grad(), self._context(micro):
            logprobs, entropies = self._model(
                tokens.token_ids, tokens.positions, tokens.targets, temperature, tokens.support
            )
        reshard(self._model)
        positions: list[int] = np.flatnonzero(sample.loss_mask).tolist()
        now: NDArray[np.float64] = logprobs.double().cpu().numpy()
        entropy: NDArray[np.float64] = entropies.double().cpu().numpy()
        mean = float(np.mean(now - sample.rollout_logprobs[sample.loss_mask]))
        return _Row(
            logprobs=dict(zip(positions, now.tolist(), strict=True)),
            entropies=dict(zip(positions, entropy.tolist(), strict=True)),
            sequence_ratio=_exp(mean),
        )

    def _culprit(
        self,
        hit: GradLocHit,
        sample: TrainingSample,
        row: _Row,
        trajectory: Trajectory,
        evidence: TrajectoryEvidence | None,
    ) -> Culprit:
        at, now = hit.position, row.logprobs[hit.position]
        rollout = float(sample.rollout_logprobs[at])
        behaviour = float(evidence.behaviour_logprobs[at]) if evidence is not None and evidence.scored[at] else None
        omega = _exp(now - rollout)
        ratios = self._history.ratios([norm for _, norm in hit.block_norms]) if hit.block_norms else ()
        start = max(0, at - CONTEXT_TOKENS)
        return Culprit(
            token_id=int(sample.token_ids[at]),
            position=at,
            trajectory_id=sample.trajectory_id,
            dispatch_id=trajectory.dispatch_id,
            policy=next(span.policy for span in trajectory.version_spans if span.start <= at < span.end),
            replica=trajectory.tag.replica,
            context_token_ids=tuple(sample.token_ids[start : at + CONTEXT_TOKENS + 1].tolist()),
            context_start=start,
            type=culprit_type(self._config, omega, row.sequence_ratio, ratios),
            norm=hit.norm,
            block_norms=hit.block_norms,
            block_ratios=tuple((name, ratio) for (name, _), ratio in zip(hit.block_norms, ratios, strict=False)),
            logprob=now,
            rollout_logprob=rollout,
            old_logprob=float(sample.old_logprobs[at]),
            d_engine=None if behaviour is None else behaviour - rollout,
            d_stale=None if behaviour is None else now - behaviour,
            omega=omega,
            sequence_ratio=row.sequence_ratio,
            advantage=float(sample.advantages[at]),
            entropy=row.entropies[at],
        )


def culprit_type(
    config: GradLocConfig, omega: float, sequence_ratio: float, block_ratios: Sequence[float]
) -> CulpritType:
    """What is odd about a culprit. A ratio that is not a number says nothing.

    Args:
        block_ratios: [blocks] its gradient's norm over the block's usual one; empty where that is not known.
    """
    if _outside(omega, config.token_ratio_bounds):
        return CulpritType.TOKEN_MISMATCH
    if _outside(sequence_ratio, config.sequence_ratio_bounds):
        return CulpritType.SEQUENCE_MISMATCH
    above = [ratio > config.block_factor for ratio in block_ratios]
    if any(above) and 2 * sum(above) <= len(above) and not any(math.isnan(ratio) for ratio in block_ratios):
        return CulpritType.BLOCK_HETEROGENEITY
    return CulpritType.UNCLASSIFIED


def _outside(ratio: float, bounds: tuple[float, float]) -> bool:
    return ratio < bounds[0] or ratio > bounds[1]


def _exp(value: float) -> float:
    """e^value; infinite where that has no double."""
    return float("inf") if value > 709.0 else math.exp(value)
