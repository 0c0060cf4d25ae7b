"""Live trainer steps with a planted spike, and the step that never had the culprit's term; for tests of the gradient
search in the trainer."""

import json
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from support.builders import build_dispatch, build_evidence, build_group, build_stored
from support.trainer import trainer_scenarios as scenarios
from support.trainer.trainer_room import VOCABULARY

from rollout.types.trajectory import StoredGroups, TrajectoryGroup
from rollout.types.weights import PolicyVersion
from trainer.batching.batcher import TrainingBatch, build_batch
from trainer.batching.packing import pack
from trainer.gradloc.gradloc import without_trajectories
from trainer.step.gradient_step import GradientReport, PhaseClock
from trainer.step.policy_trainer import PolicyTrainer
from trainer.types.evidence import AuditedGroup, audited_groups, encode_evidence
from trainer.types.gradloc import GradLocEvidence
from trainer.types.step import MicroBatch, OldLogprobSource, StepReport, StepRequest

USUAL_LOGPROB = -3.0
"""About what the small model gives its tokens: ratios stay ordinary."""
SPIKE, NOT_A_NUMBER = -10.0, -200.0
"""Nats that a planted token's log-prob is off: a ratio of e^10 that no clip bounds, and one that has no float32."""


@dataclass(frozen=True, kw_only=True)
class TokenPlace:
    """A sampled token."""

    trajectory_id: str
    position: int


def healthy_groups(seed: int, lengths: Sequence[int] = (5, 11, 8), group_size: int = 3) -> list[TrajectoryGroup]:
    rng = np.random.default_rng(seed)
    groups: list[TrajectoryGroup] = []
    for number, length in enumerate(lengths):
        spans = ((PolicyVersion(1, 0), length // 2), (PolicyVersion(1, 1), length - length // 2))
        rewards = [float(reward) for reward in rng.permutation(group_size) / group_size]
        group = build_group(
            build_dispatch(number),
            rewards,
            prompt_tokens=2 + number,
            spans=spans,
            seed=seed + number,
            vocab_size=VOCABULARY,
        )
        for trajectory in group.trajectories:
            trajectory.rollout_logprobs[trajectory.sampled] = USUAL_LOGPROB
        groups.append(group)
    return groups


def negative_places(groups: Sequence[TrajectoryGroup]) -> list[TokenPlace]:
    """Sampled tokens of the worst trajectory of each group: their advantage is negative, so a large ratio is not
    clipped."""
    worst = [group.trajectories[int(np.argmin([reward.total for reward in group.rewards]))] for group in groups]
    return [
        TokenPlace(trajectory_id=t.trajectory_id, position=int(at)) for t in worst for at in np.flatnonzero(t.sampled)
    ]


def plant(groups: Sequence[TrajectoryGroup], place: TokenPlace, nats: float = SPIKE) -> None:
    """The engine's log-prob of one token is off by `nats`."""
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.trajectory_id == place.trajectory_id:
                trajectory.rollout_logprobs[place.position] += np.float32(nats)


def spiked(seed: int, *places: TokenPlace, nats: float = SPIKE) -> StoredGroups:
    groups = healthy_groups(seed)
    for place in places:
        plant(groups, place, nats)
    return build_stored(groups)


def scored(groups: Sequence[TrajectoryGroup], place: TokenPlace, *, suspect: bool, nats: float = 0.0) -> StoredGroups:
    """With evidence whose recomputed log-probs are 0.1 above the engine's; `nats` shifts that of one token, which may
    be a suspect."""
    verdicts: list[bytes] = []
    for group in groups:
        evidence = build_evidence(group, shift=0.1)
        for each in evidence.trajectories:
            if each.trajectory_id == place.trajectory_id:
                each.behaviour_logprobs[place.position] += np.float32(nats)
        named = [
            replace(e, suspects=(place.position,) if suspect and e.trajectory_id == place.trajectory_id else ())
            for e in evidence.trajectories
        ]
        verdicts.append(encode_evidence(replace(evidence, trajectories=tuple(named))))
    return build_stored(groups, verdicts)


@contextmanager
def live_trainer(
    folder: Path, name: str, gradloc: Mapping[str, object], model: str = "dense", **config: object
) -> Generator[PolicyTrainer]:
    """A trainer of the model `folder`/`model` with several micro-batches a step."""
    settings = {"micro_batch_tokens": scenarios.SMALL, "gradloc": dict(gradloc), **config}
    trainer = scenarios.build(folder, name, model=model, config=settings)
    try:
        yield trainer
    finally:
        trainer.close()


def take(
    trainer: PolicyTrainer, groups: StoredGroups, number: int = 1, source: OldLogprobSource = OldLogprobSource.ROLLOUT
) -> StepReport:
    return trainer.step(groups, StepRequest(policy=PolicyVersion(1, number), oldest_version=0, old_logprobs=source))


def evidence_of(report: StepReport) -> GradLocEvidence:
    assert report.gradloc is not None
    return report.gradloc


def found(report: StepReport) -> list[TokenPlace]:
    return [
        TokenPlace(trajectory_id=culprit.trajectory_id, position=culprit.position)
        for culprit in evidence_of(report).culprits
    ]


def batch_of(
    trainer: PolicyTrainer, groups: StoredGroups
) -> tuple[list[AuditedGroup], TrainingBatch, tuple[MicroBatch, ...]]:
    audited = audited_groups(groups)
    batch = build_batch(audited, trainer._algorithm, 0, trainer._config.algorithm.aggregation)
    return audited, batch, pack(batch.samples, 1, trainer._config.micro_batch_tokens)[0]


def without(micro_batches: Sequence[MicroBatch], places: Sequence[TokenPlace]) -> tuple[MicroBatch, ...]:
    """The same rows and denominators; some terms were never in the loss."""
    changed: list[MicroBatch] = []
    for micro in micro_batches:
        mask = micro.loss_mask.copy()
        for place in places:
            if place.trajectory_id in micro.trajectory_ids:
                mask[micro.trajectory_ids.index(place.trajectory_id), place.position] = False
        changed.append(replace(micro, loss_mask=mask))
    return tuple(changed)


def never_had(
    trainer: PolicyTrainer,
    groups: StoredGroups,
    places: Sequence[TokenPlace] = (),
    trajectories: Sequence[str] = (),
    number: int = 1,
) -> GradientReport:
    """A step of a trainer without a search in which these terms, or these trajectories, had never been in the loss."""
    audited, batch, micro_batches = batch_of(trainer, groups)
    left = without_trajectories(without(micro_batches, places), set(trajectories))
    return trainer._gradient.run(number, [left], batch, audited, PhaseClock())


def digest(trainer: PolicyTrainer, folder: Path, name: str) -> str:
    manifest = trainer.publish(PolicyVersion(1, 9), folder / f"published-{name}")
    assert manifest is not None
    return manifest.digest


def usual_tau(folder: Path, name: str, multiple: float = 3.0, seed: int = 1) -> float:
    """So many times what a healthy step has, of a token."""
    with live_trainer(folder, name, {"enabled": False}) as trainer:
        report = take(trainer, build_stored(healthy_groups(seed)))
    return multiple * report.grad_norm * math.sqrt(report.num_tokens)


def mask_two_culprits(rank: int, world: int, folder: Path) -> None:
    """One step that masks two culprits, with the tau in `tau.json`: what rank R of W saw is `seen-wW-R.json`, the
    weights `masked-wW`."""
    gradloc = {"threshold": {"type": "given", "tau": json.loads((folder / "tau.json").read_text())}, "action": "mask"}
    trainer = scenarios.build(
        folder, "masking", rank, world, config={"micro_batch_tokens": scenarios.SMALL, "gradloc": gradloc}
    )
    places = negative_places(healthy_groups(1))
    report = take(trainer, spiked(1, places[0], places[-1]))
    trainer.publish(PolicyVersion(1, 1), folder / f"masked-w{world}")
    trainer.close()
    assert report.gradloc is not None
    culprits = sorted(
        (culprit.trajectory_id, culprit.position, culprit.omega, culprit.norm) for culprit in report.gradloc.culprits
    )
    seen = {"culprits": culprits, "acted": report.gradloc.acted, "norm": report.grad_norm, "tokens": report.num_tokens}
    (folder / f"seen-w{world}-{rank}.json").write_text(json.dumps(seen))
