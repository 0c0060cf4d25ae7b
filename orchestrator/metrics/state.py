"""What the accessors of metrics read: a step that has just ended, and the loop as it stands.

The loop's parts lie above the catalogue. What of them is read whole is a Protocol here, in which `Final` says that an
attribute is only read, so a frozen class or a narrower type will do; the rest comes as plain values.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from orchestrator.observers import StepFacts, StepPhases
from rollout.types.dispatch import Counts
from rollout.types.weights import PolicyVersion
from trainer.consistency.service.report import ReplicaGap, StepAudit
from trainer.types.step import StepReport

LabelValues: TypeAlias = tuple[str, ...]
"""Label values of one series, in the order of the metric's labels."""
Series: TypeAlias = Mapping[LabelValues, float]
"""Values of one metric; what was not measured is not there."""


class Searches(Protocol):
    """Sums over gradient searches."""

    outcomes: Final[Mapping[str, int]]
    types: Final[Mapping[str, int]]
    passes: Final[int]
    seconds: Final[float]


class Audits(Protocol):
    """What audits have found since the loop began."""

    audited: Final[int]
    degraded_steps: Final[int]
    verdicts: Final[Mapping[str, int]]
    reasons: Final[Mapping[str, int]]
    scored_tokens: Final[int]
    busy_s: Final[float]
    held_versions: Final[int]
    held_bytes: Final[int]


class ReplicaState(Protocol):
    """One engine replica as it stands."""

    slot: Final[int]
    port: Final[object]
    tag: Final[object]
    applied: Final[PolicyVersion | None]
    tolerance_nats: Final[float]
    digest_mismatches: Final[int]
    canary_failures: Final[int]

    @property
    def canary_gap_nats(self) -> float:
        """How far its newest answer to a canary was from the trainer's."""
        ...

    @property
    def sampled_tokens(self) -> int:
        """Tokens that all of its incarnations have sampled."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A step that has just been applied."""

    report: StepReport
    facts: StepFacts
    phases: StepPhases
    seconds: float
    """Wall clock since the end of the step before."""
    reward_moving_10: float
    mean_reward: Mapping[str, float]
    """Mean over all trajectories that reached a stage, by the stage's name."""
    mean_length: Mapping[str, float]
    """The same, in sampled tokens."""
    prompts: Sequence[str]
    """Ids of the prompts of the newest trained groups."""
    reward_parts: Series
    """Mean of each part of the reward that has a name of its own, and of the others together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The loop as it stands. Counts and seconds are since it began, where nothing else is said."""

    wall_s: float
    counts: Counts
    """Dispatches since the run began, by where they are."""
    opening: Counts
    """The same, when the loop began."""
    queues: Mapping[str, int]
    admission_capacity: int
    trainer_version: int
    committed_version: int
    weight_updates: int
    weights_superseded: int
    longest_pause_s: float
    """Longest pause of a replica in the last weight update."""
    trained_tokens: int
    store_s: float
    """What the loop's calls of the store took, those at the same time added up."""
    retried: int
    trainer_busy_s: float
    replica_busy_s: Mapping[int, float]
    """Seconds in which each replica generated, by slot."""
    observing_cpu_s: float
    speeds: Mapping[str, float]
    """Columns about the slowest replica."""
    steps: int
    """Applied ones."""
    skipped: int
    """Those not applied."""
    batch_wait_s: float
    last_step_s: float
    """Unix time at which the last step ended."""
    last_step_age_s: float
    """Seconds since then, by the monotonic clock."""
    started_s: float
    """Unix time at which the loop began."""
    phases: Mapping[str, float]
    """Seconds of the steps by phase."""
    trainer_phases: Mapping[str, float]
    """The same, inside the trainer."""
    searches: Searches
    side_file_failures: int
    restarts: Mapping[str, int]
    """Actors replaced, by role."""
    evaluation: Mapping[str, float]
    """Columns of the newest score."""
    scores: Series
    """The same, by configuration."""
    evaluation_tokens: int
    evaluation_s: float
    audits: Audits
    audits_skipped: int
    """Groups chosen for an audit that were let go because the service was behind."""
    findings: Mapping[str, int]
    """Findings of audits by cause."""
    newest_gaps: Mapping[int, ReplicaGap]
    """The newest audit of each replica, by slot."""
    audits_run: bool
    """There is a consistency service."""
    baselines: Mapping[int, float]
    """Each replica's own mean |d_engine| when the run began, by slot, in nats."""
    multiples: Mapping[int, float]
    """Mean |d_engine| of its newest audit over that."""
    replicas: Sequence[ReplicaState]
    diagnosis: Mapping[str, Series]
    """What the doctor found, by name of the metric."""
    step_audit: StepAudit | None = None
    """Of the newest audited step."""
    against_evidence: float = 0.0
    """That steps go against their rewards, nats."""
    audited_steps: int = 0
    sampler_evidence: float | None = None
    """Largest evidence that a replica draws from another distribution, nats; None before the first audit."""
    repeat_evidence: float | None = None
    """The same, that it repeats its samples."""
    environment: str = ""
    facts: LabelValues = ()
    """What the config says, in the order of `orchestrator.metrics.system.FACTS`."""
    max_staleness: int = 0
    batch_groups: int = 0
    memory: Mapping[str, int] = field(default_factory=dict[str, int])
    """Resident bytes by actor."""

    def share(self, seconds: float) -> float:
        """What part of the wall clock so many seconds are."""
        return seconds / max(1e-9, self.wall_s)

    def share_of_replicas(self, seconds: float) -> float:
        """Mean share over the replicas."""
        return self.share(seconds / len(self.replica_busy_s))

    @property
    def engine_busy(self) -> float:
        """Mean share in which a replica generated."""
        return min(1.0, self.share_of_replicas(sum(self.replica_busy_s.values())))

    @property
    def failed(self) -> Mapping[str, int]:
        """Dispatches by reason."""
        return Counter(dict(self.counts.failed)) - Counter(dict(self.opening.failed))

    @property
    def rejected(self) -> Mapping[str, int]:
        """Dispatches by reason."""
        return Counter(dict(self.counts.rejected)) - Counter(dict(self.opening.rejected))

    @property
    def gaps(self) -> list[ReplicaGap]:
        """The newest audit of each replica that has a scored token."""
        return [gap for gap in self.newest_gaps.values() if gap.num_tokens]
