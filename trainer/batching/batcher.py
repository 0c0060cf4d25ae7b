"""Audited groups become training samples: which tokens are in the loss, with which advantage and weight. Numpy only: it
knows no model."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from rollout.errors import UserError
from rollout.types.trajectory import EngineTag, LogprobSemantics, Trajectory, TrajectoryGroup
from trainer.batching.quarantine import quarantined_by_search
from trainer.config.trainer import AlgorithmSection
from trainer.types.evidence import AuditedGroup, TrajectoryEvidence
from trainer.types.protocols import Algorithm
from trainer.types.step import OldLogprobSource, TrainingSample, Verdict
from trainer.types.support import Truncation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingBatch:
    """All samples of one optimizer step, over all ranks."""

    samples: tuple[TrainingSample, ...]
    """Those with at least one term in the loss, or that had some before the gradient search quarantined them."""
    num_tokens: int
    """Terms in the loss."""
    temperature: float
    """At which the tokens were sampled, so at which their log-probs are taken; one for the whole batch."""
    masked_ids: frozenset[str]
    """Trajectories that lost some tokens, or all."""
    zero_variance_groups: int
    """Groups whose advantages are all 0."""
    dropped_groups: frozenset[str]
    """Dispatches of them that were left out."""
    advantage_std: float
    """Standard deviation over the trajectories of each one's mean advantage; 0 where there is none."""
    old_logprob_source: OldLogprobSource
    reward_parts: tuple[tuple[str, float], ...]
    """(part, mean over the trajectories whose reward has it), in order of first appearance."""

    @property
    def weight_square(self) -> float:
        """Sum of the squared weights of all terms."""
        return math.fsum(int(np.count_nonzero(sample.loss_mask)) * sample.token_weight**2 for sample in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """Which groups and which of their members count."""

    drops_zero_variance: bool = False
    """Groups whose advantages are all 0 leave the step before anything is counted."""
    baseline_of_trained: bool = False
    """Advantages compare the members that have a token in the loss, not the whole group."""
    compares_group: bool = True
    """Advantages need two members or more."""

    @classmethod
    def of(cls, config: AlgorithmSection) -> Self:
        """The rules that a config asks for."""
        return cls(
            drops_zero_variance=config.zero_variance_groups == "drop",
            baseline_of_trained=config.baseline == "trained",
            compares_group=config.compares_group,
        )


def build_batch(
    groups: Sequence[AuditedGroup],
    algorithm: Algorithm,
    oldest_version: int,
    aggregation: Literal["token_mean", "sequence_mean"],
    source: OldLogprobSource = OldLogprobSource.ROLLOUT,
    rules: GroupRules = GroupRules(),
) -> TrainingBatch:
    """Take the sampled tokens that the verdicts accept, except those older than `oldest_version`.

    Weights are fixed denominators, counted once over the whole batch: 1/N (token_mean, N terms) or 1/(S n)
    (sequence_mean, S samples with n terms). A trajectory that the gradient search quarantined has none of its terms in
    the loss, and all of them in the denominators: the step that it was found in had them, and a resume from before that
    step takes it again, bit for bit.

    Raises:
        UserError: the trajectories were sampled at several temperatures, or their log-probs are not of the distribution
            sampled from.
        ValueError: `source` is recomputed and a token of the loss was not scored.
    """
    members: list[_Member] = []
    masked: set[str] = set()
    dropped: set[str] = set()
    flat_groups = 0
    for audited in groups:
        group = _members(audited, algorithm, oldest_version, rules)
        masked.update(m.trajectory.trajectory_id for m in group if np.count_nonzero(m.mask) < m.trajectory.num_sampled)
        counted = [member for member in group if member.counted.any()]
        flat = not any(np.any(member.advantage) for member in group)
        flat_groups += flat
        if flat and counted and rules.drops_zero_variance:
            dropped.add(audited.group.dispatch_id)
        else:
            members += counted
    samples = [_sample(member, source) for member in members]
    counts = [int(np.count_nonzero(member.counted)) for member in members]
    means = [
        float(sample.advantages[member.counted].mean(dtype=np.float64))
        for sample, member in zip(samples, members, strict=True)
    ]
    total = sum(counts)
    weights = (
        [1.0 / max(1, total)] * len(counts)
        if aggregation == "token_mean"
        else [1.0 / (len(counts) * count) for count in counts]
    )
    return TrainingBatch(
        samples=tuple(replace(sample, token_weight=weight) for sample, weight in zip(samples, weights, strict=True)),
        num_tokens=sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples),
        temperature=_temperature({member.trajectory.tag for member in members}),
        masked_ids=frozenset(masked),
        zero_variance_groups=flat_groups,
        dropped_groups=frozenset(dropped),
        advantage_std=float(np.std(means)) if means else 0.0,
        old_logprob_source=source,
        reward_parts=reward_parts(audited.group for audited in groups),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Member:
    """One trajectory of a group on its way into the batch."""

    trajectory: Trajectory
    evidence: TrajectoryEvidence | None
    counted: NDArray[np.bool_]
    """[T] terms in the denominators."""
    mask: NDArray[np.bool_]
    """[T] terms in the loss: those, or none where the gradient search quarantined the trajectory."""
    advantage: NDArray[np.float32]
    """[] or [T]"""


def _members(
    audited: AuditedGroup, algorithm: Algorithm, oldest_version: int, rules: GroupRules
) -> tuple[_Member, ...]:
    """All trajectories of a group, with what is in the loss, and the advantages that follow from that or from all."""
    trajectories = audited.group.trajectories
    evidences = audited.evidence.trajectories if audited.evidence is not None else (None,) * len(trajectories)
    outs = [evidence is not None and quarantined_by_search(evidence) for evidence in evidences]
    counted = [
        _loss_mask(trajectory, evidence, oldest_version, Verdict.MASK if out else None)
        for trajectory, evidence, out in zip(trajectories, evidences, outs, strict=True)
    ]
    advantages = _advantages(audited.group, algorithm, [bool(mask.any()) for mask in counted], rules)
    return tuple(
        _Member(
            trajectory=trajectory,
            evidence=evidence,
            counted=mask,
            mask=np.zeros_like(mask) if out else mask,
            advantage=advantage,
        )
        for trajectory, evidence, mask, out, advantage in zip(
            trajectories, evidences, counted, outs, advantages, strict=True
        )
    )


def _advantages(
    group: TrajectoryGroup, algorithm: Algorithm, trained: Sequence[bool], rules: GroupRules
) -> Sequence[NDArray[np.float32]]:
    """[] or [T] for each trajectory. A verdict is about tokens, not about the reward, so all rewards count unless the
    rules say otherwise; those who are not compared have advantage 0."""
    if not rules.baseline_of_trained or all(trained):
        return [np.asarray(advantage) for advantage in algorithm.advantages(group)]
    places = [place for place, is_trained in enumerate(trained) if is_trained]
    result = [np.zeros((), dtype=np.float32) for _ in trained]
    if len(places) < (2 if rules.compares_group else 1):
        return result
    part = replace(
        group,
        trajectories=tuple(group.trajectories[place] for place in places),
        rewards=tuple(group.rewards[place] for place in places),
    )
    for place, advantage in zip(places, algorithm.advantages(part), strict=True):
        result[place] = np.asarray(advantage)
    return result


def reward_parts(groups: Iterable[TrajectoryGroup]) -> tuple[tuple[str, float], ...]:
    """(part, mean over the trajectories whose reward has it), in order of first appearance."""
    values: dict[str, list[float]] = {}
    for part, value in (pair for group in groups for reward in group.rewards for pair in reward.parts):
        values.setdefault(part, []).append(value)
    return tuple((part, float(np.mean(given))) for part, given in values.items())


def _for_each_token(advantage: NDArray[np.float32], trajectory: Trajectory) -> NDArray[np.float32]:
    """[T] from one advantage for the trajectory, or from [T].

    Raises:
        ValueError: it has another shape.
    """
    if advantage.shape not in ((), trajectory.token_ids.shape):
        raise ValueError(
            f"trajectory {trajectory.trajectory_id}: advantages of shape {advantage.shape} for "
            f"{trajectory.token_ids.size} tokens; expected one number, or one for each token"
        )
    return np.broadcast_to(advantage, trajectory.token_ids.shape)


def _loss_mask(
    trajectory: Trajectory, evidence: TrajectoryEvidence | None, oldest_version: int, verdict: Verdict | None
) -> NDArray[np.bool_]:
    """[T]; position 0 is never in it, since no position predicts it. `verdict` stands for that of the evidence."""
    verdict = verdict or (Verdict.ACCEPT if evidence is None else evidence.verdict)
    if verdict in (Verdict.REJECT, Verdict.QUARANTINE):
        return np.zeros(trajectory.sampled.shape, dtype=np.bool_)
    mask = trajectory.sampled.copy()
    mask[0] = False
    if evidence is not None and verdict is Verdict.MASK:
        mask &= ~evidence.masked
    for span in trajectory.version_spans:
        if span.policy.version < oldest_version:
            mask[span.start : span.end] = False
    return mask


def _sample(member: _Member, source: OldLogprobSource) -> TrainingSample:
    """Without a weight: that is known when the whole batch is counted."""
    trajectory, evidence, mask = member.trajectory, member.evidence, member.mask
    rollout, tag = np.where(mask, trajectory.rollout_logprobs, np.float32(0)), trajectory.tag
    old = rollout
    if source is OldLogprobSource.RECOMPUTED:
        missing = int(np.count_nonzero(mask if evidence is None else mask & ~evidence.scored))
        if evidence is None or missing:
            raise ValueError(
                f"trajectory {trajectory.trajectory_id}: {missing} tokens of the loss have no recomputed log-prob; "
                "expected all: score the group first, or take the rollout's log-probs for the whole step"
            )
        old = np.where(mask, evidence.behaviour_logprobs, np.float32(0))
    return TrainingSample(
        trajectory_id=trajectory.trajectory_id,
        token_ids=trajectory.token_ids,
        loss_mask=mask,
        old_logprobs=old,
        old_logprob_source=source,
        rollout_logprobs=rollout,
        advantages=_for_each_token(member.advantage, trajectory),
        token_weight=0.0,
        suspects=() if evidence is None else evidence.suspects,
        routing=trajectory.routing,
        truncation=Truncation(top_p=tag.top_p, top_k=tag.top_k, supports=trajectory.supports)
        if tag.truncates
        else None,
    )


def _temperature(tags: Collection[EngineTag]) -> float:
    temperatures = sorted({tag.temperature for tag in tags})
    if len(temperatures) > 1:
        raise UserError(
            f"got trajectories sampled at temperatures {temperatures} in one batch, expected one: keep "
            "`sampling.temperature` fixed in a run"
        )
    for tag in tags:
        semantics = tag.logprob_semantics
        if (semantics is LogprobSemantics.RAW and tag.temperature != 1.0) or (
            tag.truncates and semantics is not LogprobSemantics.PROCESSED
        ):
            raise UserError(
                f"engine {tag.engine} reports {semantics} log-probs of tokens sampled at temperature "
                f"{tag.temperature}, top_p {tag.top_p}, top_k {tag.top_k}; set its log-prob mode to processed"
            )
    return temperatures[0] if temperatures else 1.0
