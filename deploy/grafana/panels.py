"""What the dashboards show: titles, units and queries, as data. Every name is one of the catalogue, or recorded by
deploy/prometheus/rules/recording.yml."""

import re
from dataclasses import dataclass

from orchestrator.metrics.catalogue import BY_COLUMN

NAME = re.compile(r"\b(concord[_:][a-z0-9_:]+)(\{)?")
RATE = "$__rate_interval"
EXPERTS = "with experts"


@dataclass(frozen=True)
class Panel:
    """One drawing. `queries` are (PromQL, legend); `unit` is one of Grafana's."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "none"
    layer: int = 0
    """0: that of its page."""
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
    layer: int
    """For panels that name none of their own."""
    panels: tuple[Panel, ...]


def of_run(expression: str) -> str:
    """The expression for the run that the reader has chosen: each series gets the selector."""
    return NAME.sub(lambda found: f'{found[1]}{{run="$run"' + ("," if found[2] else "}"), expression)


def lines(title: str, *names: str, unit: str = "none", layer: int = 0, help: str = "") -> Panel:
    """A line for each metric without labels, named by it."""
    return Panel(title, tuple((BY_COLUMN[name].name, name) for name in names), unit, layer, help=help)


def by(title: str, expression: str, *labels: str, unit: str = "none", layer: int = 0, help: str = "") -> Panel:
    """A line for each value of the labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return Panel(title, ((expression, legend),), unit, layer, help=help)


def rates(title: str, name: str, *labels: str, unit: str = "ops", help: str = "") -> Panel:
    """Rate of a counter, a line for each value of the labels."""
    return by(title, f"rate(concord_{name}_total[{RATE}])", *labels, unit=unit, help=help)


def spread(title: str, name: str, selector: str = "", help: str = "") -> Panel:
    """A histogram over time."""
    query = f"sum by (le) (increase({BY_COLUMN[name].name}_bucket{selector}[{RATE}]))"
    return Panel(title, ((query, "{{le}}"),), kind="heatmap", help=help)


def number(title: str, expression: str, unit: str = "none", help: str = "") -> Panel:
    """One number, as it is now."""
    return Panel(title, ((expression, ""),), unit, kind="stat", help=help)


DIAGNOSIS = Panel(
    "Worst finding of each layer",
    (("concord_diagnosis", "layer {{diagnosis_layer}}"),),
    layer=4,
    kind="stat",
    help="`concord doctor RUN` says what was found and what to do. No data once the doctor's rules have failed.",
    words=(("nothing", "green"), ("info", "blue"), ("warn", "orange"), ("critical", "red")),
)
PRIMARY = Panel(
    "Top finding",
    (("concord_diagnosis_primary == 1", "{{cause}}"),),
    layer=4,
    kind="name",
    help=(
        "Cause of the doctor's primary finding; `none`: nothing worse than info. `concord doctor RUN` says what to do."
    ),
)
OVERVIEW = Dashboard(
    "concord-overview",
    "Concord: overview",
    "Four layers at a glance and the doctor's top finding. Read from the top: what is above may cause what is below.",
    4,
    (
        DIAGNOSIS,
        PRIMARY,
        number("Step", "concord_step"),
        number("Since the last step", "time() - concord_last_step_timestamp_seconds", unit="s"),
        Panel(
            "1 data and reward: reward",
            (
                ("concord_reward_mean", "reward_mean"),
                ("concord_reward_moving_10", "reward_moving_10"),
                ("concord_evaluation_score", "evaluation, configuration {{configuration}}"),
            ),
            layer=1,
        ),
        lines("2 policy change: entropy and KL", "policy_entropy", "approx_kl", "reference_kl", help="Nats.", layer=2),
        lines("3 numerical updates: gradient norm", "grad_norm", layer=3),
        lines(
            "4 training system: trainer against rollout",
            "abs_rollout_difference_mean",
            "consistency_gap_mean",
            help="Nats.",
        ),
        lines(
            "Staleness of trained tokens", "token_staleness_mean", "token_staleness_max", "max_staleness", help="Steps."
        ),
        lines("Tokens a second", "tokens_per_second"),
        by("Where the time of a step goes", "concord:step_phase:share5m", "phase", unit="percentunit"),
        lines("Dispatches since the run began", "dispatched", "trained", "rejected", "failed", "in_flight"),
    ),
)
DATA = Dashboard(
    "concord-layer-1",
    "Concord: 1 data and reward",
    "Whether there is something to learn, and whether what is learned is what was meant.",
    1,
    (
        lines("Reward", "reward_mean", "reward_moving_10", "reward_mean_dispatched", "reward_mean_finished"),
        lines("Spread of the reward", "reward_std"),
        by(
            "Evaluation, a line a configuration",
            "concord_evaluation_score",
            "configuration",
            help="A line a fingerprint.",
        ),
        lines("Evaluation: version scored, changes of its configuration", "eval_version", "eval_fingerprint_changed"),
        lines("Standard error of the evaluation", "eval_stderr"),
        by("Parts of the reward", "concord_reward_part_mean", "part"),
        lines("Length", "length_mean", "length_mean_dispatched", "length_mean_finished", help="Sampled tokens."),
        spread("Length, distribution", "response_length_tokens"),
        lines("At the length limit; reward by length", "length_cap_fraction", "reward_length_correlation"),
        lines(
            "Groups without a signal",
            "zero_variance_groups",
            "all_correct_groups",
            "all_wrong_groups",
            unit="percentunit",
        ),
        spread("Pass rate of groups", "group_pass_rate"),
        by("Groups with 30 to 70 % right", "concord:group_pass_rate:inside_30_70_share15m", unit="percentunit"),
        lines("Different prompts among the newest", "distinct_prompts", unit="percentunit"),
        rates("Environment failures", "environment_failures", "environment"),
    ),
)
POLICY = Dashboard(
    "concord-layer-2",
    "Concord: 2 policy change",
    "How far a step moves the policy. Untrusted while layer 4 has a finding.",
    2,
    (
        lines("Entropy", "policy_entropy", help="Nats."),
        lines("KL of the step", "approx_kl", help="Mean k3 of old against new log-probs, nats."),
        by("KL to version 0", "concord_reference_kl_estimate_nats", "estimator"),
        lines("Clipped tokens", "clip_fraction_low", "clip_fraction_high", unit="percentunit"),
        lines("Spread of the advantages", "advantage_std"),
        DIAGNOSIS,
        PRIMARY,
    ),
)
NUMERICAL = Dashboard(
    "concord-layer-3",
    "Concord: 3 numerical updates",
    "Gradients, blocks, clips, attention logits.",
    3,
    (
        lines("Gradient norm", "grad_norm"),
        lines("Loss", "loss"),
        lines("Learning rate", "learning_rate", unit="sci"),
        rates("Steps", "steps", "outcome"),
        by("Gradient norm by block", "concord_block_grad_norm", "block"),
        by("Largest over median block norm", "concord:block_grad_norm:max_over_median"),
        by("Scale of each block's clip", "concord_block_clip_scale_ratio", "block"),
        by("Threshold of each block's clip", "concord_block_clip_threshold", "block"),
        lines("Largest attention logit", "max_attention_logit"),
        by("Attention logits of the five largest heads", "topk(5, concord_block_max_attention_logit)", "block", "head"),
        by("Update ratio by block", "concord_block_update_ratio", "block", unit="sci"),
        by("Activations by block, RMS", "concord_block_activation_rms", "block"),
        by("Activations by block, kurtosis", "concord_block_activation_kurtosis", "block"),
        by(f"Busiest expert over the mean, blocks {EXPERTS}", "concord_block_router_load_max_ratio", "block"),
        by(f"Entropy of the experts' load, blocks {EXPERTS}", "concord_block_router_load_entropy_nats", "block"),
    ),
)
SYSTEM = Dashboard(
    "concord-layer-4",
    "Concord: 4 training system",
    "Whether engine and trainer compute the same, and where work waits.",
    4,
    (
        Panel(
            "Engine against trainer, by replica",
            (
                ('concord_replica_gap_nats{statistic=~"mean|p99"}', "{{replica}} {{statistic}}"),
                ("concord_replica_gap_limit_nats", "{{replica}} limit"),
            ),
            help="Nats.",
        ),
        by("Over the replica's own baseline", "concord_replica_baseline_multiple_ratio", "replica"),
        by(
            "Attributed gap",
            "concord_replica_attributed_nats",
            "replica",
            "cause",
            help="Nats; all 0 while the gap is within limits.",
        ),
        by("k3 of the gap", "concord_replica_gap_k3_nats", "replica", unit="sci"),
        by("Effective sample size", "concord_replica_ess_ratio", "replica", unit="percentunit"),
        by("F(2): ratio outside [1/2, 2]", "concord_replica_tail_ratio", "replica", unit="percentunit"),
        by(
            "Surprise minus entropy",
            "concord_replica_surprise_z_ratio",
            "replica",
            help="Standard deviations; near 0 where tokens are drawn as declared.",
        ),
        by(
            "Inverse temperature over the declared one",
            "concord_replica_inverse_temperature_ratio",
            "replica",
            help="Near 1 where tokens are drawn as declared.",
        ),
        lines("Evidence against the sampler", "consistency_sampler_evidence", "consistency_repeat_evidence"),
        spread("Staleness of trained tokens", "token_staleness_steps"),
        spread(
            "Importance ratio, distribution",
            "log_ratio_nats",
            '{part="total"}',
            help="Trainer now over rollout, as log-ratio in nats.",
        ),
        lines("Correction", "correction_weight_mean", "correction_ess", "correction_zero_fraction"),
        rates("Verdicts", "verdicts", "verdict"),
        rates("What failed in audited groups", "verdict_reasons", "reason"),
        rates("Findings by cause", "consistency_findings", "cause"),
        rates("Tokenizer drift", "tokenizer_drift", "kind"),
        by(
            "Experts that differ, by block",
            "concord_replica_routing_mismatch_ratio",
            "replica",
            "block",
            unit="percentunit",
        ),
        by("Coverage of routing evidence", "concord_replica_routing_coverage_ratio", "replica", unit="percentunit"),
        rates("Rejected dispatches", "rejected_groups", "reason"),
        rates("Failed dispatches", "failed_groups", "reason"),
        by("Queues", "concord_queue_depth", "queue"),
        rates("Time inside the trainer", "trainer_phase_seconds", "phase", unit="percentunit"),
        by(
            "Store latency, 99 %",
            f"histogram_quantile(0.99, sum by (le, call) (rate(concord_store_latency_seconds_bucket[{RATE}])))",
            "call",
            unit="s",
        ),
        lines(
            "Consistency service",
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
    4,
    (
        by("Up", "concord_replica_up", "replica"),
        Panel(
            "Version by replica and of the trainer",
            (("concord_replica_version", "replica {{replica}}"), ("concord_trainer_version", "trainer")),
        ),
        rates("Sampled tokens a second", "generated_tokens", "replica", unit="none"),
        lines("Tokens sampled for evaluations", "evaluation_tokens"),
        lines("Busy", "engine_busy", "evaluation_busy", "trainer_busy", unit="percentunit"),
        Panel(
            "Canary gap and its tolerance",
            (
                ("concord_replica_canary_gap_nats", "gap {{replica}}"),
                ("concord_replica_canary_tolerance_nats", "tolerance {{replica}}"),
            ),
            help="Nats.",
        ),
        by("Other bytes than published", "concord_digest_mismatches_total", "replica"),
        by("Pause of a weight update, 99 %", "concord:weight_update_pause_seconds:p99_15m", unit="s"),
        lines("Weight updates", "weight_updates", "weights_superseded"),
        lines("Work", "running", "ready", "admission_capacity"),
        lines("Seconds of a trained group", "generation_seconds", "reward_seconds", unit="s"),
        by("Restarts", "concord_restarts_total", "role"),
        by("Memory by actor", "concord_actor_memory_bytes", "actor", unit="bytes"),
        lines("The trainer waits for a batch", "batch_wait_seconds", unit="s"),
    ),
)
GRADLOC = Dashboard(
    "concord-gradloc",
    "Concord: GradLoc",
    "Searches for the tokens behind a step's gradient. `concord gradloc RUN` shows the tokens themselves.",
    3,
    (
        lines("Gradient norm", "grad_norm"),
        by("Searches by outcome", "concord_gradloc_searches_total", "outcome"),
        by("Culprits by type", "concord_gradloc_culprits_total", "type"),
        rates("Passes of searches", "gradloc_search_passes"),
        rates("Time in searches", "gradloc_search_seconds", unit="percentunit"),
        by("Skipped steps", 'concord_steps_total{outcome="skipped"}', "outcome"),
        by("Gradient norm by block", "concord_block_grad_norm", "block"),
        by("Scale of each block's clip", "concord_block_clip_scale_ratio", "block"),
    ),
)
DASHBOARDS = (OVERVIEW, DATA, POLICY, NUMERICAL, SYSTEM, FLEET, GRADLOC)
