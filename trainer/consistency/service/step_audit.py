"""What a step did to a few of the trajectories that it trained on, seen from outside the trainer.

    their tokens scored at v - 1 and v -> the trainer's log-probs against those at v - 1 -> the advantages that it used
    against those by the rewards -> what the step moved, by the advantages and by the declared learning rate

Owns these comparisons. It knows no store and no loop, and takes from the trainer only what it reports.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import StoredGroups, Trajectory, VersionSpan
from rollout.types.weights import PolicyVersion
from trainer.config.trainer import TrainerConfig
from trainer.consistency.checks.gap import default_limits
from trainer.consistency.checks.step import ADVANTAGE_TOLERANCE, Moved, advantages_of, drive, largest_update
from trainer.consistency.scoring.protocols import Rescorer, ScoreOptions
from trainer.consistency.service.report import StepAudit, StepDeviation, StepToAudit
from trainer.types.evidence import AuditedGroup, audited_groups
from trainer.types.step import TrainedTokens, Verdict

_ROUNDING = 0.01
"""Share by which rounding may change a largest update."""
_LEAST_FIRST = 0.9
"""In the first step AdamW moves the parameter with the steepest gradient by the learning rate; this share of it is
expected."""
_RESOLVED = 1e-6
"""Learning rates below are too close to the spacing of float32 at 1, where norms are, to tell whether a block moved."""
_STILL = 1e-3
"""A block whose largest update beyond weight decay is less than this share of the model's largest stands still."""


class StepScorer(Rescorer, Protocol):
    """A rescorer that also says how far weights moved."""

    def moved(self, before: PolicyVersion, after: PolicyVersion, decayed: float) -> dict[str, Moved]:
        """How far each block moved; see `HeldVersions.moved`. Empty where one of the two versions is gone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTrainer:
    """What the config says of the trainer."""

    config: TrainerConfig
    rate: Callable[[int], float]
    """Learning rate of a step (from 1)."""
    is_moe: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Row:
    """One trained trajectory, seen from both sides."""

    trajectory: Trajectory
    advantage: float | None
    """By the rewards; None where they alone do not decide it."""
    whole: bool
    """Nothing but age takes a token of it out of the loss."""
    trained: TrainedTokens
    before: NDArray[np.float32]
    """[T] nats at v - 1, NaN where it cannot be known."""
    after: NDArray[np.float32]
    """[T] nats at v."""

    @property
    def scored(self) -> NDArray[np.bool_]:
        """[n] trained tokens that are sampled ones with a score."""
        size = self.trajectory.token_ids.size
        inside = (self.trained.positions >= 0) & (self.trained.positions < size)
        at = np.where(inside, self.trained.positions, 0)
        return inside & self.trajectory.sampled[at] & np.isfinite(self.before[at])

    @property
    def push(self) -> float | None:
        """The advantage times what the step raised the log-probs of its loss tokens by."""
        at = self.trained.positions[self.scored]
        rise = float((self.after[at] - self.before[at]).sum(dtype=np.float64))
        return None if self.advantage is None else self.advantage * rise


def audit_step(
    groups: StoredGroups, step: StepToAudit, scorer: StepScorer, declared: DeclaredTrainer, options: ScoreOptions
) -> StepAudit | None:
    """What the step was seen to do; None where the weights of one of the two versions are not there any more.

    Raises:
        ConcordError: a group's bytes are damaged.
    """
    rows = _rows(audited_groups(groups), step, scorer, declared, options)
    rate = declared.rate(step.after.version)
    moved = scorer.moved(step.before, step.after, rate * declared.config.optimizer.weight_decay)
    if not moved:
        return None
    gaps = np.concatenate([np.zeros(0), *(np.abs(_gaps(row)) for row in rows)])
    limit = default_limits(declared.config.dtype, "none", declared.is_moe, deterministic=False).mean_abs_fail
    pushes = [push for push in (row.push for row in rows) if push is not None]
    size = sum(each.num_parameters for each in moved.values())
    rms = (sum(each.square for each in moved.values()) / size) ** 0.5 if size else 0.0
    deviations = (
        *_logprob_deviations(gaps, limit),
        *_position_deviations(rows, step.oldest_version),
        *_advantage_deviations(rows),
        *(_update_deviations(moved, step, declared, rate) if step.grad_norm > 0.0 and rate > 0.0 else ()),
    )
    return StepAudit(
        policy=step.after,
        rows=len(rows),
        tokens=int(gaps.size),
        gap_mean=float(gaps.mean()) if gaps.size else 0.0,
        gap_max=float(gaps.max()) if gaps.size else 0.0,
        drive=drive(pushes),
        gain=float(np.mean(pushes)) if pushes else 0.0,
        update_rates=rms / rate if rate > 0.0 else 0.0,
        deviations=deviations,
    )


def _rows(
    groups: Sequence[AuditedGroup],
    step: StepToAudit,
    scorer: StepScorer,
    declared: DeclaredTrainer,
    options: ScoreOptions,
) -> list[_Row]:
    trained = {each.trajectory_id: each for each in step.trained}
    found: list[tuple[Trajectory, float | None, bool]] = []
    for audited in groups:
        advantages = advantages_of([reward.total for reward in audited.group.rewards], declared.config.algorithm)
        judged = audited.evidence is not None and any(
            each.verdict is not Verdict.ACCEPT for each in audited.evidence.trajectories
        )
        found += [
            (trajectory, None if advantages is None else float(advantages[index]), not judged)
            for index, trajectory in enumerate(audited.group.trajectories)
            if trajectory.trajectory_id in trained
        ]
    before, after = (
        scorer.score([_under(policy, trajectory) for trajectory, _, _ in found], options)
        for policy in (step.before, step.after)
    )
    return [
        _Row(
            trajectory=trajectory,
            advantage=advantage,
            whole=whole,
            trained=trained[trajectory.trajectory_id],
            before=then,
            after=now,
        )
        for (trajectory, advantage, whole), then, now in zip(found, before, after, strict=True)
    ]


def _under(policy: PolicyVersion, trajectory: Trajectory) -> Trajectory:
    """The trajectory as if one policy had sampled all of it."""
    spans = tuple(VersionSpan(policy, span.start, span.end) for span in trajectory.version_spans)
    return replace(trajectory, version_spans=spans)


def _gaps(row: _Row) -> NDArray[np.float64]:
    """[n] the trainer's log-prob minus the service's, of the tokens that have both."""
    known = row.scored
    return (row.trained.logprobs[known] - row.before[row.trained.positions[known]]).astype(np.float64)


def _logprob_deviations(gaps: NDArray[np.float64], limit: float) -> Iterator[StepDeviation]:
    if gaps.size and not gaps.mean() <= limit:
        yield StepDeviation(
            code="trainer_logprobs",
            detail=f"the trainer's log-probs are {gaps.mean():.3g} nats a token away from the service's under the same "
            f"weights, on {gaps.size} tokens; expected at most {limit:g}",
        )


def _position_deviations(rows: Sequence[_Row], oldest_version: int) -> Iterator[StepDeviation]:
    foreign = sum(int(np.count_nonzero(~_sampled_at(row))) for row in rows)
    missing = 0
    for row in rows:
        expected = row.trajectory.sampled & (row.trajectory.token_versions() >= oldest_version)
        expected[0] = False
        expected[row.trained.positions[_sampled_at(row)]] = False
        missing += int(np.count_nonzero(expected)) if row.whole else 0
    if foreign or missing:
        yield StepDeviation(
            code="loss_positions",
            detail=f"{foreign} tokens in the loss were not sampled, and {missing} sampled ones that belong into it are "
            f"not there, in {len(rows)} trajectories; expected none",
        )


def _sampled_at(row: _Row) -> NDArray[np.bool_]:
    """[n] whether each trained position holds a sampled token."""
    size = row.trajectory.token_ids.size
    inside = (row.trained.positions > 0) & (row.trained.positions < size)
    return inside & row.trajectory.sampled[np.where(inside, row.trained.positions, 0)]


def _advantage_deviations(rows: Sequence[_Row]) -> Iterator[StepDeviation]:
    whole = [(row.trained, row.advantage) for row in rows if row.whole and row.advantage is not None]
    tolerance = ADVANTAGE_TOLERANCE * max((abs(right) for _, right in whole), default=0.0)
    wrong = [(used, right) for used, right in whole if not np.all(np.abs(used.advantages - right) <= tolerance)]
    if wrong:
        used, right = wrong[0]
        yield StepDeviation(
            code="advantages",
            detail=f"{len(wrong)} of {len(whole)} trajectories had other advantages in the loss than their rewards "
            f"give, {used.trajectory_id} {float(used.advantages.mean()):+.3g}; expected {right:+.3g}",
        )


def _update_deviations(
    moved: dict[str, Moved], step: StepToAudit, declared: DeclaredTrainer, rate: float
) -> Iterator[StepDeviation]:
    if declared.config.dtype != "float32" or rate < _RESOLVED:
        return
    top = max((each.most for each in moved.values()), default=0.0)
    still = [name for name, each in moved.items() if each.square == 0.0 or each.most < _STILL * top]
    if still:
        which = "nothing" if len(still) == len(moved) else f"not {', '.join(still[:4])}"
        yield StepDeviation(
            code="unmoved",
            detail=f"the step moved {which}, with a gradient of norm {step.grad_norm:.3g} and a learning rate of "
            f"{rate:.3g}; expected every block to move",
        )
    most = top / rate
    bound = largest_update(declared.config.optimizer, step.after.version)
    if bound is None:
        return
    if most > bound * (1.0 + _ROUNDING):
        yield StepDeviation(
            code="update_too_large",
            detail=f"a parameter moved by {most:.3g} learning rates of {rate:.3g}; AdamW moves none by more than "
            f"{bound:.3g} in step {step.after.version}",
        )
    if step.after.version == 1 and 0.0 < most < _LEAST_FIRST:
        yield StepDeviation(
            code="update_too_small",
            detail=f"no parameter moved by more than {most:.3g} learning rates of {rate:.3g} in the first step; "
            "expected 1",
        )
