"""Signals of layer 4 about agreement between engines and trainer. A part of the catalogue in
`orchestrator.metrics.catalogue`."""

from collections import Counter
from collections.abc import Callable, Mapping

from orchestrator.metrics.state import Moment, ReplicaState, Series
from orchestrator.metrics.types import (
    OTHER,
    UNMEASURED,
    CatalogueSection,
    Extent,
    Label,
    by,
    column,
    counter,
    gauge,
    histogram,
    single,
    step_column,
    total_column,
)
from trainer.consistency.checks.routing import RoutingAgreement
from trainer.consistency.service.report import ReplicaGap
from trainer.types.evidence import GapCause
from trainer.types.histograms import LOG_RATIO_EDGES
from trainer.types.step import Verdict

REASONS = (
    *(
        "lengths_differ",
        "id_outside_vocabulary",
        "doubled_bos",
        "nothing_sampled",
        "first_token_sampled",
        "prefix_broken",
    ),
    *("spans_missing", "spans_broken", "sampled_without_version", "version_without_mask"),
    *("logprobs_missing", "logprobs_all_zero", "logprob_not_finite", "logprob_positive", "logprob_impossible"),
    *("drift_special_token_count", "drift_special_token_type", "drift_non_assistant_text", "drift_assistant_text"),
    *("unknown_version", "uncommitted_version", "version_regressed"),
    *("gap_mean", "gap_k3", "gap_ess", "gap_tail", "gap_above_baseline", OTHER),
)
"""Codes of findings for which a verdict is not accept."""
CAUSES = (
    "tokenizer",
    "logprob_semantics",
    "weight_sync",
    "version_tag",
    "routing",
    "precision",
    "stale_kv",
    "low_probability_tail",
    "unknown",
)
"""Values of `trainer.types.evidence.GapCause`."""
DRIFTS = ("special_token_count", "special_token_type", "non_assistant_text", "assistant_text")
"""Values of `trainer.consistency.checks.structure.DriftKind`."""
STALENESS_EDGES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
REPLICA = Label(name="replica", extent=Extent.REPLICAS)

VERDICTS = ("accept", "mask", "reject", "quarantine")


def _worst(now: Moment, value: Callable[[ReplicaGap], float]) -> float:
    return max(map(value, now.gaps), default=UNMEASURED)


def _or_unmeasured(value: float | None) -> float:
    return UNMEASURED if value is None else value


def _routings(now: Moment) -> list[RoutingAgreement]:
    """Routing in the newest audits of the replicas that returned it, or should have."""
    return [gap.routing for gap in now.newest_gaps.values() if gap.routing is not None]


def _worst_routing(now: Moment, value: Callable[[RoutingAgreement], float]) -> float:
    return max((value(routing) for routing in _routings(now) if routing.num_rows), default=UNMEASURED)


def _by_gap(now: Moment, value: Callable[[ReplicaGap], float | None]) -> Series:
    """A value of each replica's newest audit; none where it has none."""
    return {(str(gap.replica),): found for gap in now.gaps if (found := value(gap)) is not None}


def _by_slot(values: Mapping[int, float]) -> Series:
    return {(str(slot),): value for slot, value in values.items()}


def _by_gap_and(now: Moment, values: Callable[[ReplicaGap], Mapping[str, float]]) -> Series:
    return {(str(gap.replica), name): value for gap in now.gaps for name, value in values(gap).items()}


def by_replica(now: Moment, value: Callable[[ReplicaState], float | None]) -> Series:
    """A value of each replica; none where it has none."""
    return {(str(one.slot),): found for one in now.replicas if (found := value(one)) is not None}


def _statistics(gap: ReplicaGap) -> dict[str, float]:
    p50, p90, p99 = gap.abs_quantiles
    return {"mean": gap.mean_abs, "p50": p50, "p90": p90, "p99": p99, "max": gap.max_abs}


def attributed(gap: ReplicaGap) -> dict[str, float]:
    """Nats by cause, all of them; what no cause explains is `unknown`."""
    nats = {str(cause): 0.0 for cause in GapCause}
    if gap.attribution is not None:
        for cause, part in gap.attribution.parts:
            nats[cause] += part
        nats[GapCause.UNKNOWN] += gap.attribution.residual
    return nats


def _block_mismatches(gap: ReplicaGap) -> dict[str, float]:
    if gap.routing is None or not gap.routing.num_rows:
        return {}
    return {str(block): value for block, value in enumerate(gap.routing.block_mismatch)}


def _audited(now: Moment, series: Series) -> Series:
    """The series, or none where there is no consistency service."""
    return series if now.audits_run else {}


def _drifts(now: Moment) -> Series:
    return by(DRIFTS, {kind: now.audits.reasons.get(f"drift_{kind}", 0) for kind in DRIFTS})


def _reasons(now: Moment) -> Series:
    reasons: Counter[str] = Counter()
    for reason, groups in now.audits.reasons.items():
        reasons[reason if reason in REASONS else OTHER] += groups
    return by(REASONS, reasons)


class Agreement(CatalogueSection, layer=4):
    """Whether engines and trainer compute the same."""

    abs_logprob_difference_mean = step_column("nats", lambda step: step.report.mean_abs_logprob_difference)
    """Mean |log pi_now - old log-prob| over the loss's tokens: staleness and engine together."""
    abs_rollout_difference_mean = step_column("nats", lambda step: step.report.mean_abs_rollout_difference)
    """Mean |log pi_now - rollout log-prob| over the loss's tokens: |d_total|."""
    abs_engine_difference_mean = step_column("nats", lambda step: step.report.mean_abs_engine_difference)
    """Mean |recomputed - rollout log-prob| over the loss's tokens: |d_engine|; 0 where nothing was recomputed."""
    correction_weight_mean = step_column("ratio", lambda step: step.report.correction_weight_mean)
    """Mean importance weight of the loss's tokens after the correction."""
    correction_ess = step_column("ratio", lambda step: step.report.correction_ess)
    """Effective sample size of the correction's weights, as a fraction of the tokens."""
    correction_zero_fraction = step_column("ratio", lambda step: step.report.correction_zero_fraction)
    """Share of the loss's tokens that the correction takes out."""
    routing_replayed = step_column("ratio", lambda step: step.report.routing_replayed_fraction)
    """Share of the trained inputs that ran on the engine's experts (trainer.replay_routing); 0 without a replay."""
    routing_fallback = step_column("ratio", lambda step: step.report.routing_fallback_fraction)
    """Share of the trained inputs that fell back to the trainer's own because the engine's are missing; 0 without a
    replay."""
    consistency_gap_mean = column("nats", lambda now: _worst(now, lambda gap: gap.mean_abs), optional=True)
    """Mean |d_engine| of the newest audit, the worst replica's; -1 before the first."""
    consistency_gap_k3 = column("nats", lambda now: _worst(now, lambda gap: gap.k3), optional=True)
    """Mean k3 of d_engine of the newest audit, the worst replica's; -1 before the first."""
    consistency_gap_ess = column(
        "ratio", lambda now: min((gap.ess for gap in now.gaps), default=UNMEASURED), optional=True
    )
    """Effective sample size of the raw engine ratios, the worst replica's; -1 before the first."""
    consistency_gap_tail = column("ratio", lambda now: _worst(now, lambda gap: gap.outside_factor_two), optional=True)
    """F(2): share of tokens whose engine ratio is outside [1/2, 2], the worst replica's; -1 before the first."""
    consistency_baseline_multiple = column(
        "ratio", lambda now: max(now.multiples.values(), default=UNMEASURED), optional=True
    )
    """Mean |d_engine| over the replica's own at the start, the worst replica's; -1 before the first."""
    consistency_routing_mismatch = column(
        "ratio", lambda now: _worst_routing(now, lambda routing: routing.mismatch), optional=True
    )
    """Share of (token, block) cells whose experts differ, the worst replica's; -1 where none was compared."""
    consistency_routing_any_mismatch = column(
        "ratio", lambda now: _worst_routing(now, lambda routing: routing.token_any_mismatch), optional=True
    )
    """Share of tokens whose experts differ in some block, the worst replica's; -1: none compared."""
    consistency_routing_coverage = column(
        "ratio", lambda now: min((routing.coverage for routing in _routings(now)), default=UNMEASURED), optional=True
    )
    """Share of sampled tokens with whole routing evidence, the worst replica's; -1 where none is expected."""
    consistency_trainer_gap = column(
        "nats", lambda now: UNMEASURED if now.step_audit is None else now.step_audit.gap_mean, optional=True
    )
    """Mean |trainer's log-prob - service's| of the same tokens under the same weights, in the newest audited step; -1
    before the first."""
    consistency_step_drive = column(
        "ratio", lambda now: 0.0 if now.step_audit is None else now.step_audit.drive, optional="consistency_trainer_gap"
    )
    """How strongly the newest audited step moved trajectories by their advantages: the sum of advantage x rise of the
    log-probs over the root of the squares; above 0 where steps do what rewards ask for."""
    consistency_update_rates = column(
        "ratio",
        lambda now: 0.0 if now.step_audit is None else now.step_audit.update_rates,
        optional="consistency_trainer_gap",
    )
    """Root mean square of what parameters moved by in the newest audited step, in learning rates as declared."""
    consistency_against_evidence = column("nats", lambda now: now.against_evidence)
    """Evidence that steps go against their rewards; reported at 12."""
    consistency_audited_steps = total_column("steps", lambda now: now.audited_steps)
    """Steps that the consistency service has looked at since the loop began."""
    consistency_sampler_evidence = column("nats", lambda now: _or_unmeasured(now.sampler_evidence), optional=True)
    """Evidence that a replica draws from another distribution than it declares, the worst replica's; reported at
    consistency.sampler_evidence_nats; -1 before the first audit."""
    consistency_repeat_evidence = column("nats", lambda now: _or_unmeasured(now.repeat_evidence), optional=True)
    """Evidence that a replica repeats its samples, the worst replica's; reported at consistency.sampler_evidence_nats;
    -1 before the first audit."""
    consistency_audited_groups = total_column("groups", lambda now: now.audits.audited)
    """Groups that the consistency service has scored since the loop began."""
    consistency_skipped_groups = total_column("groups", lambda now: now.audits_skipped)
    """Groups chosen for an audit and let go because the service was behind."""
    consistency_masked = total_column("trajectories", lambda now: now.audits.verdicts.get(Verdict.MASK, 0))
    """Trajectories with verdict mask since the loop began."""
    consistency_rejected = total_column("trajectories", lambda now: now.audits.verdicts.get(Verdict.REJECT, 0))
    """Trajectories with verdict reject since the loop began."""
    consistency_quarantined = total_column("trajectories", lambda now: now.audits.verdicts.get(Verdict.QUARANTINE, 0))
    """Trajectories with verdict quarantine since the loop began."""
    consistency_degraded_steps = total_column("steps", lambda now: now.audits.degraded_steps)
    """Steps of mode gate that went on without recomputed log-probs."""
    consistency_busy = column("ratio", lambda now: now.share(now.audits.busy_s))
    """Share of the wall clock in which the service worked, since the loop began."""
    consistency_held_versions = column("versions", lambda now: now.audits.held_versions)
    """Weight versions in the service's memory."""
    consistency_held_bytes = column("bytes", lambda now: now.audits.held_bytes)
    """Weights in the service's memory."""
    auditor_restarts = total_column("restarts", lambda now: now.restarts["auditor"])
    """Consistency service actors replaced since the loop began."""
    token_staleness_mean = step_column("steps", lambda step: step.facts.staleness_mean)
    """Mean staleness of the trained tokens."""
    token_staleness_max = step_column("steps", lambda step: step.facts.staleness_max)
    """Staleness of the oldest trained token."""
    mixed_version_trajectories = step_column("ratio", lambda step: step.facts.mixed_fraction)
    """Share of trained trajectories that span more than one version."""
    token_staleness_steps = histogram("steps", STALENESS_EDGES)
    """Staleness of the trained tokens: steps between the version that sampled them and the trainer's."""
    log_ratio_nats = histogram("nats", LOG_RATIO_EDGES, Label(name="part", values=("total", "engine", "stale")))
    """Differences of the loss's tokens: log pi_now - rollout log-prob (total), recomputed - rollout log-prob (engine),
    log pi_now - recomputed (stale). Engine and stale need recomputed log-probs (mode gate)."""
    audited_log_ratio_nats = histogram("nats", LOG_RATIO_EDGES, REPLICA)
    """d_engine of every audited token: recomputed - rollout log-prob."""
    replica_gap_nats = gauge(
        "nats",
        lambda now: _by_gap_and(now, _statistics),
        REPLICA,
        Label(name="statistic", values=("mean", "p50", "p90", "p99", "max")),
    )
    """|d_engine| of the replica's newest audit."""
    replica_gap_limit_nats = gauge("nats", lambda now: _by_gap(now, lambda gap: gap.mean_abs_limit), REPLICA)
    """Mean |d_engine| above which the replica's gap fails: by its numerics, or `consistency.limits`."""
    replica_gap_k3_nats = gauge("nats", lambda now: _by_gap(now, lambda gap: gap.k3), REPLICA)
    """Mean k3 of d_engine of the replica's newest audit."""
    replica_surprise_z = gauge(
        "ratio", lambda now: _by_gap(now, lambda gap: gap.sampling.z if gap.sampling.num_tokens else None), REPLICA
    )
    """Surprise minus entropy of the tokens of the replica's newest audit, in standard deviations: near 0 where they are
    drawn from the declared distribution."""
    replica_inverse_temperature = gauge(
        "ratio",
        lambda now: _by_gap(now, lambda gap: gap.sampling.inverse_temperature if gap.sampling.variance > 0 else None),
        REPLICA,
    )
    """Power of the declared distribution that the tokens of the replica's newest audit look drawn from: near 1 where
    they are drawn as declared, above 1 where the sampler is sharper."""
    replica_ess = gauge("ratio", lambda now: _by_gap(now, lambda gap: gap.ess), REPLICA)
    """Effective sample size of the raw engine ratios of the replica's newest audit."""
    replica_tail = gauge("ratio", lambda now: _by_gap(now, lambda gap: gap.outside_factor_two), REPLICA)
    """F(2) of the replica's newest audit: share of tokens whose engine ratio is outside [1/2, 2]."""
    replica_baseline_nats = gauge("nats", lambda now: _by_slot(now.baselines), REPLICA)
    """The replica's own mean |d_engine| when the run began."""
    replica_baseline_multiple = gauge(
        "ratio", lambda now: _by_gap(now, lambda gap: now.multiples.get(gap.replica)), REPLICA
    )
    """Mean |d_engine| of the replica's newest audit over its own when the run began."""
    replica_attributed_nats = gauge(
        "nats", lambda now: _by_gap_and(now, attributed), REPLICA, Label(name="cause", values=CAUSES)
    )
    """What each cause explains of the gap in the replica's newest audit; all 0 while the gap is within limits."""
    replica_routing_mismatch = gauge(
        "ratio", lambda now: _by_gap_and(now, _block_mismatches), REPLICA, Label(name="block", extent=Extent.BLOCKS)
    )
    """Share of a block's cells whose experts differ, in the replica's newest audit."""
    replica_routing_coverage = gauge(
        "ratio", lambda now: _by_gap(now, lambda gap: None if gap.routing is None else gap.routing.coverage), REPLICA
    )
    """Share of sampled tokens with whole routing evidence in the replica's newest audit."""
    replica_canary_gap_nats = gauge(
        "nats", lambda now: by_replica(now, lambda one: None if one.tag is None else one.canary_gap_nats), REPLICA
    )
    """Gap of the replica's newest answer to a canary; infinite when it received other bytes than were published."""
    replica_canary_tolerance_nats = gauge(
        "nats", lambda now: by_replica(now, lambda one: None if one.tag is None else one.tolerance_nats), REPLICA
    )
    """Gap above which a canary has failed: 3 x the replica's own gap at its start."""
    digest_mismatches = counter("updates", lambda now: by_replica(now, lambda one: one.digest_mismatches), REPLICA)
    """Weight updates of which a replica received other bytes than were published."""
    canary_failures = counter("updates", lambda now: by_replica(now, lambda one: one.canary_failures), REPLICA)
    """Weight updates after which the replica's canary was outside its tolerance. The replica is replaced at once, and
    its gap goes with it; this stays."""
    verdicts = counter(
        "trajectories",
        lambda now: _audited(now, by(VERDICTS, now.audits.verdicts)),
        Label(name="verdict", values=VERDICTS),
    )
    """Audited trajectories by verdict."""
    verdict_reasons = counter("groups", lambda now: _audited(now, _reasons(now)), Label(name="reason", values=REASONS))
    """Audited groups in which something failed, by what it was."""
    consistency_findings = counter(
        "findings", lambda now: _audited(now, by(CAUSES, now.findings)), Label(name="cause", values=CAUSES)
    )
    """Audits and canaries that found a replica at fault, by cause."""
    tokenizer_drift = counter("groups", lambda now: _audited(now, _drifts(now)), Label(name="kind", values=DRIFTS))
    """Audited groups whose tokens are not those of their text, by kind of drift."""
    audited_tokens = counter("tokens", lambda now: _audited(now, single(now.audits.scored_tokens)))
    """Tokens that the consistency service sent through the model, what-if questions included."""
