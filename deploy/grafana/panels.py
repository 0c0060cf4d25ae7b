"""What the dashboards show: titles, units and queries, as data. Every name is one of the catalogue, or recorded by
deploy/prometheus/rules/recording.yml."""

import re
from dataclasses import dataclass

NAME = re.compile(r"\b(concord[_:][a-z0-9_:]+)(\{)?")
RATE = "$__rate_interval"
EXPERTS = "with experts"


@dataclass(frozen=True)
class Panel:
    """One drawing. `queries` are (PromQL, legend); `unit` is one of Grafana's."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    layer: int
    kind: str = "timeseries"
    """timeseries, stat, name (the legend of each series that the query leaves) or heatmap."""
    help: str = ""
    words: tuple[tuple[str, str], ...] = ()
    """What to write for the values 0, 1, ...: (word, colour)."""


@dataclass(frozen=True)
class Dashboard:
    """One page of panels."""

    uid: str
    title: str
    about: str
    panels: tuple[Panel, ...]


def of_run(expression: str) -> str:
    """The expression for the run that the reader has chosen: each series gets the selector."""
    return NAME.sub(lambda found: f'{found[1]}{{run="$run"' + ("," if found[2] else "}"), expression)


def lines(title: str, unit: str, layer: int, *names: str, help: str = "") -> Panel:
    """A line for each metric without labels, named by it."""
    return Panel(title, unit, tuple((f"concord_{name}", name) for name in names), layer, help=help)


def by(title: str, unit: str, layer: int, expression: str, *labels: str, help: str = "") -> Panel:
    """A line for each value of the labels."""
    return Panel(title, unit, ((expression, " ".join(f"{{{{{label}}}}}" for label in labels)),), layer, help=help)


def rates(title: str, unit: str, layer: int, name: str, *labels: str, help: str = "") -> Panel:
    """Rate of a counter, a line for each value of the labels."""
    return by(title, unit, layer, f"rate(concord_{name}_total[{RATE}])", *labels, help=help)


def spread(title: str, unit: str, layer: int, name: str, help: str = "") -> Panel:
    """A histogram over time."""
    return Panel(
        title, unit, ((f"sum by (le) (increase(concord_{name}_bucket[{RATE}]))", "{{le}}"),), layer, "heatmap", help
    )


def number(title: str, unit: str, layer: int, expression: str, help: str = "") -> Panel:
    """One number, as it is now."""
    return Panel(title, unit, ((expression, ""),), layer, "stat", help)


DIAGNOSIS = Panel(
    "Worst finding of each layer",
    "none",
    (("concord_diagnosis", "layer {{diagnosis_layer}}"),),
    4,
    "stat",
    "`concord doctor RUN` says what was found and what to do. No data once the doctor's rules have failed.",
    (("nothing", "green"), ("info", "blue"), ("warn", "orange"), ("critical", "red")),
)
PRIMARY = Panel(
    "Top finding",
    "none",
    (("concord_diagnosis_primary == 1", "{{cause}}"),),
    4,
    "name",
    "Cause of the doctor's primary finding; `none`: nothing worse than info. `concord doctor RUN` says what to do.",
)

OVERVIEW = Dashboard(
    "concord-overview",
    "Concord: overview",
    "Four layers at a glance and the doctor's top finding. Read from the top: what is above may cause what is below.",
    (
        DIAGNOSIS,
        PRIMARY,
        number("Step", "none", 4, "concord_step"),
        number("Since the last step", "s", 4, "time() - concord_last_step_timestamp_seconds"),
        Panel(
            "1 data and reward: reward",
            "none",
            (
                ("concord_reward_mean", "reward_mean"),
                ("concord_reward_moving_10", "reward_moving_10"),
                ("concord_evaluation_score", "evaluation, configuration {{configuration}}"),
            ),
            1,
        ),
        lines(
            "2 policy change: entropy and KL", "none", 2, "policy_entropy", "approx_kl", "reference_kl", help="Nats."
        ),
        lines("3 numerical updates: gradient norm", "none", 3, "grad_norm"),
        lines(
            "4 training system: trainer against rollout",
            "none",
            4,
            "abs_rollout_difference_mean",
            "consistency_gap_mean",
            help="Nats.",
        ),
        lines(
            "Staleness of trained tokens",
            "none",
            4,
            "token_staleness_mean",
            "token_staleness_max",
            "max_staleness",
            help="Steps.",
        ),
        lines("Tokens a second", "none", 4, "tokens_per_second"),
        by("Where the time of a step goes", "percentunit", 4, "concord:step_phase:share5m", "phase"),
        lines("Dispatches since the run began", "none", 4, "dispatched", "trained", "rejected", "failed", "in_flight"),
    ),
)

DATA = Dashboard(
    "concord-layer-1",
    "Concord: 1 data and reward",
    "Whether there is something to learn, and whether what is learned is what was meant.",
    (
        lines("Reward", "none", 1, "reward_mean", "reward_moving_10", "reward_mean_dispatched", "reward_mean_finished"),
        lines("Spread of the reward", "none", 1, "reward_std"),
        by(
            "Evaluation, a line a configuration",
            "none",
            1,
            "concord_evaluation_score",
            "configuration",
            help="A line a fingerprint.",
        ),
        lines(
            "Evaluation: version scored, changes of its configuration",
            "none",
            1,
            "eval_version",
            "eval_fingerprint_changed",
        ),
        lines("Standard error of the evaluation", "none", 1, "eval_stderr"),
        by("Parts of the reward", "none", 1, "concord_reward_part_mean", "part"),
        lines(
            "Length", "none", 1, "length_mean", "length_mean_dispatched", "length_mean_finished", help="Sampled tokens."
        ),
        spread("Length, distribution", "none", 1, "response_length_tokens"),
        lines("At the length limit; reward by length", "none", 1, "length_cap_fraction", "reward_length_correlation"),
        lines(
            "Groups without a signal",
            "percentunit",
            1,
            "zero_variance_groups",
            "all_correct_groups",
            "all_wrong_groups",
        ),
        spread("Pass rate of groups", "none", 1, "group_pass_rate"),
        by("Groups with 30 to 70 % right", "percentunit", 1, "concord:group_pass_rate:inside_30_70_share15m"),
        lines("Different prompts among the newest", "percentunit", 1, "distinct_prompts"),
        rates("Environment failures", "ops", 1, "environment_failures", "environment"),
    ),
)

POLICY = Dashboard(
    "concord-layer-2",
    "Concord: 2 policy change",
    "How far a step moves the policy. Untrusted while layer 4 has a finding.",
    (
        lines("Entropy", "none", 2, "policy_entropy", help="Nats."),
        lines("KL of the step", "none", 2, "approx_kl", help="Mean k3 of old against new log-probs, nats."),
        by("KL to version 0", "none", 2, "concord_reference_kl_nats", "estimator"),
        lines("Clipped tokens", "percentunit", 2, "clip_fraction_low", "clip_fraction_high"),
        lines("Spread of the advantages", "none", 2, "advantage_std"),
        DIAGNOSIS,
        PRIMARY,
    ),
)

NUMERICAL = Dashboard(
    "concord-layer-3",
    "Concord: 3 numerical updates",
    "Gradients, blocks, clips, attention logits.",
    (
        lines("Gradient norm", "none", 3, "grad_norm"),
        lines("Loss", "none", 3, "loss"),
        lines("Learning rate", "sci", 3, "learning_rate"),
        rates("Steps", "ops", 3, "steps", "outcome"),
        by("Gradient norm by block", "none", 3, "concord_block_grad_norm", "block"),
        by("Largest over median block norm", "none", 3, "concord:block_grad_norm:max_over_median"),
        by("Scale of each block's clip", "none", 3, "concord_block_clip_scale", "block"),
        by("Threshold of each block's clip", "none", 3, "concord_block_clip_threshold", "block"),
        lines("Largest attention logit", "none", 3, "max_attention_logit"),
        by(
            "Attention logits of the five largest heads",
            "none",
            3,
            "topk(5, concord_block_max_attention_logit)",
            "block",
            "head",
        ),
        by("Update ratio by block", "sci", 3, "concord_block_update_ratio", "block"),
        by("Activations by block, RMS", "none", 3, "concord_block_activation_rms", "block"),
        by("Activations by block, kurtosis", "none", 3, "concord_block_activation_kurtosis", "block"),
        by(f"Busiest expert over the mean, blocks {EXPERTS}", "none", 3, "concord_block_router_load_max", "block"),
        by(f"Entropy of the experts' load, blocks {EXPERTS}", "none", 3, "concord_block_router_load_entropy", "block"),
    ),
)

SYSTEM = Dashboard(
    "concord-layer-4",
    "Concord: 4 training system",
    "Whether engine and trainer compute the same, and where work waits.",
    (
        Panel(
            "Engine against trainer, by replica",
            "none",
            (
                ('concord_replica_gap_nats{statistic=~"mean|p99"}', "{{replica}} {{statistic}}"),
                ("concord_replica_gap_limit_nats", "{{replica}} limit"),
            ),
            4,
            help="Nats.",
        ),
        by("Over the replica's own baseline", "none", 4, "concord_replica_baseline_multiple", "replica"),
        by(
            "Attributed gap",
            "none",
            4,
            "concord_replica_attributed_nats",
            "replica",
            "cause",
            help="Nats; all 0 while the gap is within limits.",
        ),
        by("k3 of the gap", "sci", 4, "concord_replica_gap_k3_nats", "replica"),
        by("Effective sample size", "percentunit", 4, "concord_replica_ess", "replica"),
        by("F(2): ratio outside [1/2, 2]", "percentunit", 4, "concord_replica_tail", "replica"),
        spread("Staleness of trained tokens", "none", 4, "token_staleness_steps"),
        Panel(
            "Importance ratio, distribution",
            "none",
            ((f'sum by (le) (increase(concord_log_ratio_nats_bucket{{part="total"}}[{RATE}]))', "{{le}}"),),
            4,
            "heatmap",
            "Trainer now over rollout, as log-ratio in nats.",
        ),
        lines("Correction", "none", 4, "correction_weight_mean", "correction_ess", "correction_zero_fraction"),
        rates("Verdicts", "ops", 4, "verdicts", "verdict"),
        rates("What failed in audited groups", "ops", 4, "verdict_reasons", "reason"),
        rates("Findings by cause", "ops", 4, "consistency_findings", "cause"),
        rates("Tokenizer drift", "ops", 4, "tokenizer_drift", "kind"),
        by("Experts that differ, by block", "percentunit", 4, "concord_replica_routing_mismatch", "replica", "block"),
        by("Coverage of routing evidence", "percentunit", 4, "concord_replica_routing_coverage", "replica"),
        rates("Rejected dispatches", "ops", 4, "rejected_groups", "reason"),
        rates("Failed dispatches", "ops", 4, "failed_groups", "reason"),
        by("Queues", "none", 4, "concord_queue_depth", "queue"),
        rates("Time inside the trainer", "percentunit", 4, "trainer_phase_seconds", "phase"),
        by(
            "Store latency, 99 %",
            "s",
            4,
            f"histogram_quantile(0.99, sum by (le, call) (rate(concord_store_latency_seconds_bucket[{RATE}])))",
            "call",
        ),
        lines(
            "Consistency service",
            "none",
            4,
            "consistency_audited_groups",
            "consistency_skipped_groups",
            "consistency_degraded_steps",
        ),
    ),
)

FLEET = Dashboard(
    "concord-fleet",
    "Concord: rollout fleet",
    "Each engine replica: alive, on which version, how fast, how long its updates pause it.",
    (
        by("Up", "none", 4, "concord_replica_up", "replica"),
        Panel(
            "Version by replica and of the trainer",
            "none",
            (("concord_replica_version", "replica {{replica}}"), ("concord_trainer_version", "trainer")),
            4,
        ),
        rates("Sampled tokens a second", "none", 4, "generated_tokens", "replica"),
        lines("Tokens sampled for evaluations", "none", 4, "evaluation_tokens"),
        lines("Busy", "percentunit", 4, "engine_busy", "evaluation_busy", "trainer_busy"),
        Panel(
            "Canary gap and its tolerance",
            "none",
            (
                ("concord_replica_canary_gap_nats", "gap {{replica}}"),
                ("concord_replica_canary_tolerance_nats", "tolerance {{replica}}"),
            ),
            4,
            help="Nats.",
        ),
        by("Other bytes than published", "none", 4, "concord_digest_mismatches_total", "replica"),
        by("Pause of a weight update, 99 %", "s", 4, "concord:weight_update_pause_seconds:p99_15m"),
        lines("Weight updates", "none", 4, "weight_updates", "weights_superseded"),
        lines("Work", "none", 4, "running", "ready", "admission_capacity"),
        lines("Seconds of a trained group", "s", 4, "generation_seconds", "reward_seconds"),
        by("Restarts", "none", 4, "concord_restarts_total", "role"),
        by("Memory by actor", "bytes", 4, "concord_actor_memory_bytes", "actor"),
        lines("The trainer waits for a batch", "s", 4, "batch_wait_seconds"),
    ),
)

GRADLOC = Dashboard(
    "concord-gradloc",
    "Concord: GradLoc",
    "Searches for the tokens behind a step's gradient. `concord gradloc RUN` shows the tokens themselves.",
    (
        lines("Gradient norm", "none", 3, "grad_norm"),
        by("Searches by outcome", "none", 3, "concord_gradloc_searches_total", "outcome"),
        by("Culprits by type", "none", 3, "concord_gradloc_culprits_total", "type"),
        rates("Passes of searches", "ops", 3, "gradloc_search_passes"),
        rates("Time in searches", "percentunit", 3, "gradloc_search_seconds"),
        by("Skipped steps", "none", 3, 'concord_steps_total{outcome="skipped"}', "outcome"),
        by("Gradient norm by block", "none", 3, "concord_block_grad_norm", "block"),
        by("Scale of each block's clip", "none", 3, "concord_block_clip_scale", "block"),
    ),
)

DASHBOARDS = (OVERVIEW, DATA, POLICY, NUMERICAL, SYSTEM, FLEET, GRADLOC)
