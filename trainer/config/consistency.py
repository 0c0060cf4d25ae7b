"""Config of the consistency service: when it scores, what it corrects, and from where on it complains. Torch-free."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from rollout.config import Section


class CorrectionSection(Section):
    """What every correction has. All bounds are importance ratios."""

    couples_tokens: ClassVar[bool] = False
    """Whether a token's weight depends on the other loss tokens of its sequence; with a veto it always does."""
    carries_ratio: ClassVar[bool] = False
    """Whether a weight is the ratio itself; else it only keeps or drops."""
    veto: PositiveFloat | None = None
    """A sequence with any ratio below this leaves the loss whole, its KL and entropy terms included; None is off (1e-4
    is usual)."""


class NoCorrection(CorrectionSection):
    """Every weight is 1."""

    type: Literal["none"] = "none"


class TisConfig(CorrectionSection):
    """Truncated importance sampling: min(ratio, cap), token by token."""

    carries_ratio: ClassVar[bool] = True
    type: Literal["tis"] = "tis"
    cap: PositiveFloat = 2.0
    """Largest weight."""


class BandSection(CorrectionSection):
    """A band of ratios."""

    low: PositiveFloat
    high: PositiveFloat

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"got low = {self.low:g} and high = {self.high:g}; set low below high: both are ratios")
        return self


class IcePopConfig(BandSection):
    """The ratio where low <= ratio <= high, else 0, token by token."""

    carries_ratio: ClassVar[bool] = True
    type: Literal["icepop"] = "icepop"
    low: PositiveFloat = 0.5
    """Least ratio that keeps a token."""
    high: PositiveFloat = 5.0
    """Largest ratio that keeps a token."""


class MisTokenConfig(BandSection):
    """Masked importance sampling by token: the ratio inside the band, else 0; inclusive."""

    carries_ratio: ClassVar[bool] = True
    type: Literal["mis_token"] = "mis_token"
    low: PositiveFloat = 0.5
    """Least ratio that keeps a token."""
    high: PositiveFloat = 2.0
    """Largest ratio that keeps a token."""


class MisSequenceConfig(BandSection):
    """Masked importance sampling by sequence: every token weighs the sequence's product of ratios where that is inside
    the band, else 0; inclusive.

    A product grows with length (1.1 a token is 13,780 after 100), so the band suits short answers; `geo_rs` is
    normalised by length.
    """

    couples_tokens: ClassVar[bool] = True
    carries_ratio: ClassVar[bool] = True
    type: Literal["mis_sequence"] = "mis_sequence"
    low: PositiveFloat = 0.5
    """Least product that keeps a sequence."""
    high: PositiveFloat = 3.0
    """Largest product that keeps a sequence."""


class SeqClipConfig(BandSection):
    """Keep a sequence only where low < geometric mean of its ratios < high; kept tokens weigh 1."""

    couples_tokens: ClassVar[bool] = True
    type: Literal["seq_clip"] = "seq_clip"
    low: PositiveFloat = 0.995
    """Least geometric mean, exclusive."""
    high: PositiveFloat = 1.005
    """Largest geometric mean, exclusive."""


class GeoRsConfig(BandSection):
    """As `seq_clip`, bounds inclusive."""

    couples_tokens: ClassVar[bool] = True
    type: Literal["geo_rs"] = "geo_rs"
    low: PositiveFloat = 0.99
    """Least geometric mean, inclusive."""
    high: PositiveFloat = 1.01
    """Largest geometric mean, inclusive."""


class OpsmConfig(CorrectionSection):
    """Off-policy sequence masking: drop a sequence with a negative advantage whose mean(log pi_rollout - log pi_now) is
    above delta, in every mode; its KL term stays."""

    couples_tokens: ClassVar[bool] = True
    type: Literal["opsm"] = "opsm"
    delta: NonNegativeFloat = 1e-4
    """Nats."""


class DecoupledConfig(CorrectionSection):
    """Decoupled surrogate: (pi_prox / pi_behaviour, or 0 where it is above cap) x the clipped (pi_theta / pi_prox),
    where pi_prox is the policy at the start of the step."""

    carries_ratio: ClassVar[bool] = True
    type: Literal["decoupled"] = "decoupled"
    cap: PositiveFloat | None = None
    """Tokens with a larger weight are dropped, as in the implementation of AReaL (`tis` clamps instead); None leaves
    weights unbounded."""


CorrectionConfig = Annotated[
    NoCorrection
    | TisConfig
    | IcePopConfig
    | MisTokenConfig
    | MisSequenceConfig
    | SeqClipConfig
    | GeoRsConfig
    | OpsmConfig
    | DecoupledConfig,
    Field(discriminator="type"),
]


class GapLimits(Section):
    """From where on a gap between engine and trainer is reported (warn) and acted on (fail)."""

    mean_abs_warn: PositiveFloat
    """Mean |d_engine| in nats."""
    mean_abs_fail: PositiveFloat
    """Mean |d_engine| in nats."""
    k3_warn: PositiveFloat
    """Mean k3 in nats."""
    k3_fail: PositiveFloat
    """Mean k3 in nats."""
    ess_warn: PositiveFloat = 0.5
    """Effective sample size as a fraction; below it."""
    ess_fail: PositiveFloat = 0.3
    """Effective sample size as a fraction; below it."""
    baseline_multiple: PositiveFloat = 3.0
    """Also an alarm: this many times the run's own gap at step 0."""


class ConsistencyConfig(Section):
    """The consistency service."""

    mode: Literal["off", "audit", "gate"] = "audit"
    """`gate`: every group is scored before it is trained on, and its old log-probs are the recomputed ones. `audit`: a
    share is scored off the critical path, for people and alarms only; the estimator stays as in `off`. `off`: nothing
    is scored, no service starts."""
    audit_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of groups that mode `audit` scores."""
    workers: PositiveInt = 1
    """Service actors."""
    num_cpus: NonNegativeFloat = 1.0
    """Ray CPUs a service actor."""
    num_gpus: NonNegativeFloat = 0.0
    """Ray GPUs a service actor; 0 scores on CPU."""
    threads: PositiveInt = 1
    """Compute threads a service actor, on CPU."""
    batch_tokens: PositiveInt = 16384
    """Rows x longest row of one forward pass."""
    max_versions: PositiveInt | None = None
    """Weight versions in memory besides version 0; None takes max_staleness + 2."""
    deadline_s: PositiveFloat = 60.0
    """For one batch of groups; then the service actor is replaced."""
    when_behind: Literal["wait", "audit"] = "wait"
    """`gate` only: `wait` holds training back until groups are scored; `audit` lets a step whose groups waited for more
    than `behind_s` go on without, with an event."""
    behind_s: PositiveFloat = 30.0
    """How long a ready group may wait for its score before `when_behind` decides."""
    on_fail: Literal["observe", "mask", "reject", "quarantine"] = "quarantine"
    """What happens to a trajectory whose log-probs its policy does not explain; only `gate` acts on it. Different
    tokens are always rejected."""
    sampler_evidence_nats: PositiveFloat | None = 20.0
    """Evidence in nats at which a replica is reported to draw from another distribution than it declares, or to repeat
    its samples; None is off."""
    step_audit_trajectories: NonNegativeInt = 4
    """Trained trajectories of each step that the service scores under the weights before and behind it, to see whether
    trainer and service agree and whether the step did what their rewards ask for; 0 is off."""
    limits: GapLimits | None = None
    """None takes the defaults for the engine's dtype, quantisation and routing."""
    correction: CorrectionConfig = NoCorrection()
    """Importance weights in the loss; in `gate` of engine against trainer, else of rollout against the policy at the
    start of the step."""
