"""Audited groups become training samples: which tokens are in the loss, with which advantage and weight. Numpy only: it knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollout.errors import UserError
from rollout.trajectory import LogprobSemantics, Trajectory
from trainer.protocols import Algorithm
from trainer.types import AuditedGroup, OldLogprobSource, TrainingSample, Verdict


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """All samples of one optimizer step, over all ranks."""

    samples: tuple[TrainingSample, ...]
    """Those with at least one term in the loss."""
    num_tokens: int
    """Terms in the loss."""
    temperature: float
    """At which the tokens were sampled, so at which their log-probs are taken; one for the whole batch."""
    masked_ids: frozenset[str]
    """Trajectories that lost some tokens, or all."""
    zero_variance_groups: int
    """Groups whose advantages are all 0: they count in the denominators and add no gradient."""


def build_batch(
    groups: Sequence[AuditedGroup], algorithm: Algorithm, oldest_version: int, aggregation: Literal["token_mean", "sequence_mean"]
) -> TrainingBatch:
    """Take the sampled tokens of accepted trajectories, except those older than `oldest_version`.

    Weights are fixed denominators, counted once over the whole batch: 1/N (token_mean, N terms) or 1/(S n) (sequence_mean, S samples with n terms).

    Raises:
        UserError: the trajectories were sampled at several temperatures, or their log-probs are not of the distribution sampled from.
        ValueError: a verdict asks to mask tokens without naming them.
    """
    masks: list[tuple[Trajectory, NDArray[np.bool_], float]] = []
    masked: set[str] = set()
    flat_groups = 0
    for audited in groups:
        advantages = algorithm.advantages(audited.group.rewards)
        flat_groups += not np.any(advantages)
        for trajectory, verdict, advantage in zip(audited.group.trajectories, audited.verdicts, advantages.tolist(), strict=True):
            mask = _loss_mask(trajectory, verdict, oldest_version)
            kept = int(np.count_nonzero(mask))
            if kept < trajectory.num_sampled:
                masked.add(trajectory.trajectory_id)
            if kept:
                masks.append((trajectory, mask, advantage))
    counts = [int(np.count_nonzero(mask)) for _, mask, _ in masks]
    total = sum(counts)
    weights = [1.0 / max(1, total)] * len(counts) if aggregation == "token_mean" else [1.0 / (len(counts) * count) for count in counts]
    return TrainingBatch(
        samples=tuple(_sample(*parts, weight) for parts, weight in zip(masks, weights, strict=True)),
        num_tokens=total,
        temperature=_temperature([trajectory for trajectory, _, _ in masks]),
        masked_ids=frozenset(masked),
        zero_variance_groups=flat_groups,
    )


def _loss_mask(trajectory: Trajectory, verdict: Verdict, oldest_version: int) -> NDArray[np.bool_]:
    """[T]; position 0 is never in it, since no position predicts it."""
    if verdict is Verdict.MASK:
        raise ValueError(f"trajectory {trajectory.trajectory_id}: verdict mask names no tokens; expected accept, reject or quarantine")
    if verdict is not Verdict.ACCEPT:
        return np.zeros(trajectory.sampled.shape, dtype=np.bool_)
    mask = trajectory.sampled.copy()
    mask[0] = False
    for span in trajectory.version_spans:
        if span.policy.version < oldest_version:
            mask[span.start : span.end] = False
    return mask


def _sample(trajectory: Trajectory, mask: NDArray[np.bool_], advantage: float, weight: float) -> TrainingSample:
    return TrainingSample(
        trajectory_id=trajectory.trajectory_id,
        token_ids=trajectory.token_ids,
        loss_mask=mask,
        old_logprobs=np.where(mask, trajectory.rollout_logprobs, np.float32(0)),
        old_logprob_source=OldLogprobSource.ROLLOUT,
        advantage=advantage,
        token_weight=weight,
    )


def _temperature(trajectories: Sequence[Trajectory]) -> float:
    tags = {trajectory.tag for trajectory in trajectories}
    temperatures = sorted({tag.temperature for tag in tags})
    if len(temperatures) > 1:
        raise UserError(f"got trajectories sampled at temperatures {temperatures} in one batch, expected one: keep `sampling.temperature` fixed in a run")
    raw = [tag.engine for tag in tags if tag.logprob_semantics is LogprobSemantics.RAW and tag.temperature != 1.0]
    if raw:
        raise UserError(f"engine {raw[0]} reports raw log-probs of tokens sampled at temperature {temperatures[0]}; set its log-prob mode to processed")
    return temperatures[0] if temperatures else 1.0
