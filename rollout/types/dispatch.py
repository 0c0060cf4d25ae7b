"""The unit of accounting: one attempt at one group of one prompt, from its durable record to its single end."""

from dataclasses import dataclass, field
from enum import StrEnum

from rollout.types.prompts import Prompt
from rollout.types.weights import PolicyVersion
from rollout.types.wire import wired


class DispatchState(StrEnum):
    """Where a dispatch is. Every dispatch ends once, in one of the last three."""

    DISPATCHED = "dispatched"
    """Recorded; an episode worker may be at it."""
    READY = "ready"
    """Its group is durable."""
    AUDITED = "audited"
    """Its group carries a verdict of the consistency service."""
    LEASED = "leased"
    """The trainer has it; with a step version set, it was trained in a step that no checkpoint holds yet."""
    TRAINED = "trained"
    REJECTED = "rejected"
    FAILED = "failed"


class RejectReason(StrEnum):
    """Why a finished group was not trained on."""

    STALE = "stale"
    """Its oldest token is more than max_staleness steps old."""
    ORPHANED_VERSION = "orphaned_version"
    """It holds tokens of a version that a resume took back."""
    CANARY = "canary"
    """It holds tokens that a replica sampled under weights that failed verification."""
    ALL_MASKED = "all_masked"
    """No token of it was left in the loss."""
    NO_DIFFERENCE = "no_difference"
    """Its advantages are all 0, and trainer.algorithm.zero_variance_groups = "drop" leaves such groups out."""
    INCONSISTENT = "inconsistent"
    """The consistency service rejected all of its trajectories: other tokens, or log-probs that cannot be repaired."""
    QUARANTINED = "quarantined"
    """The consistency service or the gradient search took it out of training, and kept it with its evidence."""
    NON_FINITE = "non_finite"
    """Its step had a non-finite loss, gradient or update and was not applied."""
    GRADIENT_SPIKE = "gradient_spike"
    """The gradient search found the tokens behind a spike in its step, which was not applied (trainer.gradloc.action =
    "skip")."""


class FailReason(StrEnum):
    """Why a dispatch produced no group."""

    LOST = "lost"
    """The process that ran it is gone (found at recovery)."""
    ENGINE = "engine"
    """The engine replica failed or died."""
    WORKER = "worker"
    """The episode worker died, or its own work on the dispatch failed."""
    ENVIRONMENT = "environment"
    """The environment raised."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt leaves no room for a token in the context."""
    REWARD_TIMEOUT = "reward_timeout"
    """The reward passed its deadline."""
    REWARD_RAISED = "reward_raised"
    """The reward function raised."""
    REWARD_INVALID = "reward_invalid"
    """The reward was NaN, infinite or not a number."""
    REWARD_WORKER_DIED = "reward_worker_died"
    """The reward worker died while it judged."""
    DEADLINE = "deadline"
    """The episode passed its deadline."""


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One attempt at one group of one prompt; durable before any engine sees the prompt."""

    dispatch_id: str
    prompt: Prompt
    group_size: int
    attempt: int
    """1 for the first attempt at this prompt in this pass."""
    policy: PolicyVersion
    """The committed policy at dispatch. It names no token: token versions come from the engine."""
    replica: int
    """Engine slot that is asked first."""
    created_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Readmission:
    """A prompt that comes again, before new ones, as `attempt`."""

    prompt: Prompt
    attempt: int


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a dispatch that was not trained."""

    dispatch_id: str
    reason: RejectReason | FailReason
    detail: str
    readmit: bool
    """Put the prompt back into the re-admission queue, in the same transaction."""

    @property
    def state(self) -> DispatchState:
        return DispatchState.REJECTED if isinstance(self.reason, RejectReason) else DispatchState.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommit:
    """The commit record of optimizer step `policy.version`: it, and nothing else, says what was trained."""

    policy: PolicyVersion
    """The policy that the step produced."""
    dispatch_ids: tuple[str, ...]
    """Groups of which at least one trajectory was trained."""
    trajectories_trained: int
    trajectories_masked: int
    trajectories_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A policy version that healthy engines confirmed. Monotonic in version within an epoch."""

    policy: PolicyVersion
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Where all dispatches are. `total` = `in_flight` + `trained` + rejected + failed, always (invariant 1)."""

    total: int = 0
    dispatched: int = 0
    ready: int = 0
    audited: int = 0
    leased: int = 0
    """Leased and not yet trained."""
    trained_held: tuple[tuple[int, int], ...] = ()
    """(version of the step, groups): trained, leased until a checkpoint holds the step."""
    trained: int = 0
    """Terminal."""
    rejected: tuple[tuple[str, int], ...] = ()
    failed: tuple[tuple[str, int], ...] = ()

    @property
    def in_flight(self) -> int:
        return self.dispatched + self.ready + self.audited + self.leased + sum(n for _, n in self.trained_held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Run totals that the commit records add up to."""

    steps: int = 0
    trajectories_trained: int = 0
    trajectories_masked: int = 0
    trajectories_dropped: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Readmitted:
    """A mutation's answer: the counts after it, and the prompts that it put back."""

    counts: Counts
    readmissions: tuple[Readmission, ...] = field(default=())
