"""Signals of layer 4 about agreement between engines and trainer. A part of the catalogue in
`orchestrator.metrics.catalogue`."""

from orchestrator.metrics.types import OTHER, Extent, Label, Metric, column, counter, gauge, histogram, optional_column
from trainer.types.histograms import LOG_RATIO_EDGES

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
    *("logprobs_missing", "logprobs_all_zero", "logprob_not_finite", "logprob_positive"),
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

CONSISTENCY: tuple[Metric, ...] = (
    column(
        "abs_logprob_difference_mean",
        "nats",
        4,
        "Mean |log pi_now - old log-prob| over the loss's tokens: staleness and engine together.",
    ),
    column(
        "abs_rollout_difference_mean",
        "nats",
        4,
        "Mean |log pi_now - rollout log-prob| over the loss's tokens: |d_total|.",
    ),
    column(
        "abs_engine_difference_mean",
        "nats",
        4,
        "Mean |recomputed - rollout log-prob| over the loss's tokens: |d_engine|; 0 where nothing was recomputed.",
    ),
    column("correction_weight_mean", "ratio", 4, "Mean importance weight of the loss's tokens after the correction."),
    column("correction_ess", "ratio", 4, "Effective sample size of these weights, as a fraction of the tokens."),
    column("correction_zero_fraction", "ratio", 4, "Share of the loss's tokens that the correction takes out."),
    column(
        "routing_replayed",
        "ratio",
        4,
        "Share of the trained inputs that ran on the engine's experts (trainer.replay_routing); 0 without a replay.",
    ),
    column(
        "routing_fallback",
        "ratio",
        4,
        "Share of them that fell back to the trainer's own because the engine's are missing; 0 without a replay.",
    ),
    optional_column(
        "consistency_gap_mean",
        "nats",
        4,
        "Mean |d_engine| of the newest audit, the worst replica's; -1 before the first.",
    ),
    optional_column(
        "consistency_gap_k3",
        "nats",
        4,
        "Mean k3 of d_engine of the newest audit, the worst replica's; -1 before the first.",
    ),
    optional_column(
        "consistency_gap_ess",
        "ratio",
        4,
        "Effective sample size of the raw engine ratios, the worst replica's; -1 before the first.",
    ),
    optional_column(
        "consistency_gap_tail",
        "ratio",
        4,
        "F(2): share of tokens whose engine ratio is outside [1/2, 2], the worst replica's; -1 before the first.",
    ),
    optional_column(
        "consistency_baseline_multiple",
        "ratio",
        4,
        "Mean |d_engine| over the replica's own at the start, the worst replica's; -1 before the first.",
    ),
    optional_column(
        "consistency_routing_mismatch",
        "ratio",
        4,
        "Share of (token, block) cells whose experts differ, the worst replica's; -1 where none was compared.",
    ),
    optional_column(
        "consistency_routing_any_mismatch",
        "ratio",
        4,
        "Share of tokens whose experts differ in some block, the worst replica's; -1: none compared.",
    ),
    optional_column(
        "consistency_routing_coverage",
        "ratio",
        4,
        "Share of sampled tokens with whole routing evidence, the worst replica's; -1 where none is expected.",
    ),
    column(
        "consistency_audited_groups",
        "groups",
        4,
        "Groups that the consistency service has scored since the loop began.",
    ),
    column(
        "consistency_skipped_groups",
        "groups",
        4,
        "Groups chosen for an audit and let go because the service was behind.",
    ),
    column("consistency_masked", "trajectories", 4, "Trajectories with verdict mask since the loop began."),
    column("consistency_rejected", "trajectories", 4, "Trajectories with verdict reject since the loop began."),
    column("consistency_quarantined", "trajectories", 4, "Trajectories with verdict quarantine since the loop began."),
    column("consistency_degraded_steps", "steps", 4, "Steps of mode gate that went on without recomputed log-probs."),
    column(
        "consistency_busy", "ratio", 4, "Share of the wall clock in which the service worked, since the loop began."
    ),
    column("consistency_held_versions", "versions", 4, "Weight versions in the service's memory."),
    column("consistency_held_bytes", "bytes", 4, "Weights in the service's memory."),
    column("auditor_restarts", "restarts", 4, "Consistency service actors replaced since the loop began."),
    column("token_staleness_mean", "steps", 4, "Mean staleness of the trained tokens."),
    column("token_staleness_max", "steps", 4, "Staleness of the oldest trained token."),
    column("mixed_version_trajectories", "ratio", 4, "Share of trained trajectories that span more than one version."),
    histogram(
        "token_staleness_steps",
        "steps",
        4,
        "Staleness of the trained tokens: steps between the version that sampled them and the trainer's.",
        STALENESS_EDGES,
    ),
    histogram(
        "log_ratio_nats",
        "nats",
        4,
        "Of the loss's tokens: log pi_now - rollout log-prob (total), recomputed - rollout log-prob (engine), "
        "log pi_now - recomputed (stale). Engine and stale need recomputed log-probs (mode gate).",
        LOG_RATIO_EDGES,
        Label(name="part", values=("total", "engine", "stale")),
    ),
    histogram(
        "audited_log_ratio_nats",
        "nats",
        4,
        "d_engine of every audited token: recomputed - rollout log-prob.",
        LOG_RATIO_EDGES,
        REPLICA,
    ),
    gauge(
        "replica_gap_nats",
        "nats",
        4,
        "|d_engine| of the replica's newest audit.",
        REPLICA,
        Label(name="statistic", values=("mean", "p50", "p90", "p99", "max")),
    ),
    gauge(
        "replica_gap_limit_nats",
        "nats",
        4,
        "Mean |d_engine| above which the replica's gap fails: by its numerics, or `consistency.limits`.",
        REPLICA,
    ),
    gauge("replica_gap_k3_nats", "nats", 4, "Mean k3 of d_engine of the replica's newest audit.", REPLICA),
    gauge(
        "replica_ess",
        "ratio",
        4,
        "Effective sample size of the raw engine ratios of the replica's newest audit.",
        REPLICA,
    ),
    gauge(
        "replica_tail",
        "ratio",
        4,
        "F(2) of the replica's newest audit: share of tokens whose engine ratio is outside [1/2, 2].",
        REPLICA,
    ),
    gauge("replica_baseline_nats", "nats", 4, "The replica's own mean |d_engine| when the run began.", REPLICA),
    gauge(
        "replica_baseline_multiple",
        "ratio",
        4,
        "Mean |d_engine| of the replica's newest audit over its own when the run began.",
        REPLICA,
    ),
    gauge(
        "replica_attributed_nats",
        "nats",
        4,
        "What each cause explains of the gap in the replica's newest audit; all 0 while the gap is within limits.",
        REPLICA,
        Label(name="cause", values=CAUSES),
    ),
    gauge(
        "replica_routing_mismatch",
        "ratio",
        4,
        "Share of a block's cells whose experts differ, in the replica's newest audit.",
        REPLICA,
        Label(name="block", extent=Extent.BLOCKS),
    ),
    gauge(
        "replica_routing_coverage",
        "ratio",
        4,
        "Share of sampled tokens with whole routing evidence in the replica's newest audit.",
        REPLICA,
    ),
    gauge(
        "replica_canary_gap_nats",
        "nats",
        4,
        "Of the replica's newest answer to a canary; infinite when it received other bytes than were published.",
        REPLICA,
    ),
    gauge(
        "replica_canary_tolerance_nats",
        "nats",
        4,
        "Above it a canary has failed: 3 x the replica's own gap at its start.",
        REPLICA,
    ),
    counter(
        "digest_mismatches",
        "updates",
        4,
        "Weight updates of which a replica received other bytes than were published.",
        REPLICA,
    ),
    counter(
        "verdicts",
        "trajectories",
        4,
        "Audited trajectories by verdict.",
        Label(name="verdict", values=("accept", "mask", "reject", "quarantine")),
    ),
    counter(
        "verdict_reasons",
        "groups",
        4,
        "Audited groups in which something failed, by what it was.",
        Label(name="reason", values=REASONS),
    ),
    counter(
        "consistency_findings",
        "findings",
        4,
        "Audits and canaries that found a replica at fault, by cause.",
        Label(name="cause", values=CAUSES),
    ),
    counter(
        "tokenizer_drift",
        "groups",
        4,
        "Audited groups whose tokens are not those of their text, by kind of drift.",
        Label(name="kind", values=DRIFTS),
    ),
    counter(
        "audited_tokens",
        "tokens",
        4,
        "Tokens that the consistency service sent through the model, what-if questions included.",
    ),
)
