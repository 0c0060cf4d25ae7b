"""What passes between the driver and the service: who is asked about, and what came out, in ids and numbers, never
tokens. Torch-free."""

from dataclasses import dataclass

from rollout.types.weights import PolicyVersion
from trainer.consistency.checks.gap import GapBaseline
from trainer.consistency.checks.routing import RoutingAgreement
from trainer.consistency.checks.sampling import NO_SAMPLES, SamplingSums
from trainer.types.evidence import Attribution, CheckFinding
from trainer.types.histograms import NO_LOG_RATIOS, BucketCounts
from trainer.types.step import TrainedTokens, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What the driver knows of a replica and the service cannot see."""

    replica: int
    canary_gap: float
    """Mean |log-prob difference| of its newest canary answer, nats."""
    canary_tolerance: float
    """Above it the canary has failed."""
    baseline: GapBaseline | None
    """Its own gap when the run began; None: not measured yet, so the next audit of it is the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditContext:
    """What the service is given with a batch of groups."""

    committed: frozenset[PolicyVersion]
    """Those policies of the groups that the ledger has committed."""
    replicas: tuple[ReplicaFacts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVerdict:
    """One audited group."""

    dispatch_id: str
    replica: int
    verdicts: tuple[Verdict, ...]
    """One a trajectory."""
    reasons: tuple[str, ...]
    """Codes of what failed, once each."""
    complete: bool
    """Every sampled token was scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGap:
    """One replica in one batch: how far its log-probs are from the trainer's, and why."""

    replica: int
    newest: PolicyVersion
    """Newest policy among its tokens."""
    engine: str
    num_tokens: int
    """Scored tokens."""
    mean_abs: float
    """Mean |d_engine|, nats."""
    mean_abs_limit: float
    """Mean |d_engine| in nats above which the gap fails, for the numerics that the engine declares."""
    max_abs: float
    """Nats."""
    k3: float
    """Mean k3 of d_engine, nats: KL(rollout || trainer)."""
    ess: float
    """Effective sample size of the raw ratios, as a fraction."""
    outside_factor_two: float
    """Share of tokens whose ratio or its inverse is above 2: F(2)."""
    findings: tuple[CheckFinding, ...]
    """Findings about all its trajectories, without repeats of one code."""
    attribution: Attribution | None
    """None while the gap is within limits."""
    trainer_rounding: float | None = None
    """Mean |difference| of the trainer's log-probs from its own in float32, nats; measured with the replica's baseline
    only."""
    abs_quantiles: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """50 %, 90 % and 99 % quantile of |d_engine|, nats; 0 without a scored token."""
    log_ratios: BucketCounts = NO_LOG_RATIOS
    """d_engine of the scored tokens, by the buckets of `trainer.types.histograms.LOG_RATIO_EDGES`."""
    routing: RoutingAgreement | None = None
    """Over rows that predict a scored token; with a coverage below 1 the engine's evidence has holes. None for a dense
    model, and where no routing came and none was expected."""
    sampling: SamplingSums = NO_SAMPLES
    """Whether its tokens look drawn from the distribution that it declares; without tokens where that is off."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepToAudit:
    """An applied step that the service shall look at."""

    before: PolicyVersion
    after: PolicyVersion
    oldest_version: int
    """Tokens sampled under an older version are not in its loss."""
    grad_norm: float
    trained: tuple[TrainedTokens, ...]
    """What the trainer reports of a few trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDeviation:
    """Something that a step did otherwise than declared."""

    code: str
    """`trainer_logprobs`, `loss_positions`, `advantages`; `unmoved`, `update_too_large`, `update_too_small`."""
    detail: str
    """Got, expected, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAudit:
    """What a step was seen to do."""

    policy: PolicyVersion
    """That it produced."""
    rows: int
    """Trajectories that were compared."""
    tokens: int
    """Tokens of them with a log-prob from both sides."""
    gap_mean: float
    """Mean |trainer's log-prob - service's| under the weights before the step, nats."""
    gap_max: float
    drive: float
    """See `trainer.consistency.checks.step.drive`."""
    gain: float
    """Mean over the trajectories of advantage x rise of their log-probs, nats."""
    update_rates: float
    """Root mean square of what parameters moved by, in declared learning rates."""
    deviations: tuple[StepDeviation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The answer to one batch."""

    groups: tuple[GroupVerdict, ...]
    gaps: tuple[ReplicaGap, ...]
    scored_tokens: int
    """Tokens that went through the model, what-if questions included."""
    seconds: float
    held_versions: int
    held_bytes: int
    """Weights in the service's memory."""
