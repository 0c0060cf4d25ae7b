"""What the dashboards show: titles and queries, as data. Every name is one of the catalogue, or recorded by
deploy/prometheus/rules/recording.yml; those of engines, Ray and GPUs stand in `machines.py`."""

from dataclasses import dataclass

from shape import Dashboard, Panel, Row, by, lines, number, rates, spread

FIRING = 'ALERTS{alertstate="firing"}'


@dataclass(frozen=True)
class Event:
    """A moment that every dashboard marks on its time axes."""

    name: str
    query: str
    title: str
    """With labels in `{{}}`."""
    colour: str
    on: bool = True
    """Shown unless the reader switches it off."""
    at_value: bool = False
    """The query's value is the moment, in milliseconds; else the moment is when the query has a value."""


EVENTS = (
    Event("Alerts", FIRING, "{{alertname}}", "red"),
    Event("Starts and resumes", "concord_start_timestamp_seconds * 1000", "started or resumed", "blue", at_value=True),
    Event("Replaced actors", "increase(concord_restarts_total[1m]) > 0", "{{role}} replaced", "purple"),
    Event("Skipped steps", 'increase(concord_steps_total{outcome="skipped"}[1m]) > 0', "step not applied", "orange"),
    Event(
        "Located gradients", 'increase(concord_gradloc_searches_total{outcome="located"}[1m]) > 0', "GradLoc", "orange"
    ),
    Event("Evaluations", "changes(concord_eval_version[1m]) > 0", "evaluated", "green", on=False),
    Event(
        "Changed evaluations", "increase(concord_eval_fingerprint_changed_total[1m]) > 0", "other evaluation", "yellow"
    ),
)
HEALTH = Panel(
    "Is it healthy?",
    (("concord:run_health:worst", ""),),
    unit="short",
    layer=4,
    kind="stat",
    help=(
        "The worst alert that fires. `not running`: Prometheus does not scrape the run now, or has not loaded "
        "deploy/prometheus/rules. Why not: the alerts and the finding beside it, each with a link to what to do."
    ),
    words=(("healthy", "green"), ("warnings", "orange"), ("critical", "red")),
    empty="not running",
    wide=4,
)
ALERT_TILES = Panel(
    "Why not: alerts",
    ((f'max by (alertname) (2 * {FIRING[:-1]},severity="critical"}} or {FIRING})', "{{alertname}}"),),
    unit="short",
    layer=4,
    kind="name",
    help="Alerts that fire now, critical ones red. Each links to its section of the runbook.",
    empty="none fires",
    wide=10,
)
DIAGNOSIS = Panel(
    "Worst finding of each layer",
    (("concord_diagnosis", "layer {{diagnosis_layer}}"),),
    layer=4,
    kind="stat",
    help="`concord doctor RUN` says what was found and what to do. No data once the doctor's rules have failed.",
    words=(("nothing", "green"), ("info", "blue"), ("warn", "orange"), ("critical", "red")),
    alerts=("ConcordDoctorCritical", "ConcordDoctorWarning", "ConcordDoctorFailed"),
    wide=8,
)
PRIMARY = Panel(
    "Why not: the doctor's first finding",
    (('concord_diagnosis_primary{cause!="none"} == 1', "{{cause}}"),),
    layer=4,
    kind="name",
    unit="short",
    help="Its primary finding, which links to what to do about it; `concord doctor RUN` has the evidence.",
    empty="nothing worse than info",
    wide=10,
)
ALERT_HISTORY = Panel(
    "Alerts over time",
    ((f"max by (alertname, severity) ({FIRING})", "{{alertname}}"),),
    unit="short",
    layer=4,
    kind="timeline",
    help="When which alert fired.",
    words=(("", "transparent"), ("fires", "red")),
    empty="none fired",
    wide=24,
)
RUNS = Panel(
    "Runs of the last week",
    (("last_over_time(concord_run_info[7d])", ""),),
    unit="short",
    layer=4,
    kind="table",
    help="What each was started with. A click on a name shows that run over the last week.",
    wide=24,
)
OVERVIEW = Dashboard(
    "concord-overview",
    "Concord: overview",
    "Whether a run is healthy and why not, then the four layers, each with a link to its own page. What stands above "
    "may cause what stands below.",
    4,
    (
        Row(
            "Is it healthy, and why not",
            (
                HEALTH,
                ALERT_TILES,
                PRIMARY,
                DIAGNOSIS,
                number("Step", "concord_step", wide=4),
                number(
                    "Since the last step",
                    "concord_last_step_age_seconds",
                    alerts=("ConcordRunStalled", "ConcordRunUnreachable"),
                    wide=4,
                ),
                number("Time that a step takes", "concord_step_seconds", wide=4),
                number("Replicas that serve", "sum(concord_replica_up)", alerts=("ConcordNoReplicaUp",), wide=4),
                ALERT_HISTORY,
            ),
        ),
        Row(
            "The four layers",
            (
                lines(
                    "1 data and reward: reward",
                    "reward_mean",
                    "reward_moving_10",
                    "eval_score",
                    layer=1,
                    pages=("concord-layer-1",),
                ),
                lines(
                    "2 policy change: entropy and KL",
                    "policy_entropy",
                    "approx_kl",
                    layer=2,
                    pages=("concord-layer-2",),
                ),
                lines("3 numerical updates: gradient norm", "grad_norm", layer=3, pages=("concord-layer-3",)),
                lines(
                    "4 training system: trainer against rollout",
                    "abs_rollout_difference_mean",
                    "consistency_gap_mean",
                    pages=("concord-layer-4",),
                ),
                lines("Tokens a second", "tokens_per_second", pages=("concord-fleet",)),
                by(
                    "Where the time of a step goes",
                    "concord:step_phase:share5m",
                    "phase",
                    unit="percentunit",
                    help="Shares of the last five minutes: waiting for groups, training, publishing, checkpoints.",
                    alerts=("ConcordTrainerStarved",),
                    pages=("concord-layer-4",),
                ),
            ),
        ),
        Row("Runs", (RUNS,)),
    ),
)
DATA = Dashboard(
    "concord-layer-1",
    "Concord: 1 data and reward",
    "Whether there is something to learn, and whether what is learned is what was meant.",
    1,
    (
        Row(
            "Reward",
            (
                lines("Reward", "reward_mean", "reward_moving_10", "reward_mean_dispatched", "reward_mean_finished"),
                lines("Spread of the reward", "reward_std"),
            ),
        ),
        Row(
            "Difficulty",
            (
                lines(
                    "Groups without a signal",
                    "zero_variance_groups",
                    "all_correct_groups",
                    "all_wrong_groups",
                    alerts=("ConcordZeroVarianceGroups", "ConcordAllGroupsCorrect", "ConcordAllGroupsWrong"),
                ),
                spread("Pass rate of groups", "group_pass_rate"),
                by(
                    "Groups with 30 to 70 % right",
                    "concord:group_pass_rate:inside_30_70_share15m",
                    unit="percentunit",
                    help="Share of the groups of a quarter of an hour: what teaches most.",
                ),
                lines("Different prompts among the newest", "distinct_prompts", alerts=("ConcordRepeatedPrompts",)),
                lines("Samples that repeat each other", "sample_repeats", "sample_repeats_expected"),
            ),
        ),
        Row(
            "Length",
            (
                lines(
                    "Length",
                    "length_mean",
                    "length_mean_dispatched",
                    "length_mean_finished",
                    alerts=("ConcordLengthGrowth",),
                ),
                spread("Length, distribution", "response_length_tokens"),
                lines(
                    "Answers that end by length",
                    "length_cap_fraction",
                    "length_cut_fraction",
                    alerts=("ConcordResponsesCut",),
                ),
                lines("Reward by length", "reward_length_correlation"),
            ),
        ),
        Row(
            "Environment",
            (
                rates(
                    "Environment failures",
                    "environment_failures",
                    "environment",
                    alerts=("ConcordEnvironmentFailures",),
                ),
            ),
        ),
        Row(
            "Evaluation",
            (
                by(
                    "Evaluation, a line a configuration",
                    "concord_evaluation_score",
                    "configuration",
                    alerts=("ConcordRewardWithoutEvaluation",),
                ),
                lines("Standard error of the evaluation", "eval_stderr"),
                lines("Version that was scored", "eval_version"),
                by(
                    "Changes of the evaluation's configuration",
                    "concord_eval_fingerprint_changed_total",
                    alerts=("ConcordEvaluationChanged",),
                ),
            ),
            needs="evaluation.every_steps",
        ),
        Row(
            "Parts of the reward",
            (by("Parts of the reward", "concord_reward_part_mean", "part"),),
            needs="a reward function that returns parts",
        ),
    ),
)
POLICY = Dashboard(
    "concord-layer-2",
    "Concord: 2 policy change",
    "How far a step moves the policy. Untrusted while layer 4 has a finding.",
    2,
    (
        Row(
            "Policy",
            (
                lines("Entropy", "policy_entropy", alerts=("ConcordEntropyCollapse",)),
                lines("KL of the step", "approx_kl", alerts=("ConcordPolicyDrift",)),
                lines("Clipped tokens", "clip_fraction_low", "clip_fraction_high", alerts=("ConcordClipping",)),
                lines("Spread of the advantages", "advantage_std"),
            ),
        ),
        Row(
            "Distance from version 0",
            (by("KL to version 0", "concord_reference_kl_estimate_nats", "estimator"),),
            needs="trainer.algorithm.kl_coef",
        ),
        Row(
            "The algorithm's own",
            (by("What the algorithm measures", "concord_algorithm_statistic", "statistic"),),
            needs="an algorithm that declares statistics",
        ),
    ),
)
NUMERICAL = Dashboard(
    "concord-layer-3",
    "Concord: 3 numerical updates",
    "Gradients, blocks, clips, attention logits, and the searches for the tokens behind a gradient "
    "(`concord gradloc RUN` shows the tokens themselves).",
    3,
    (
        Row(
            "Steps",
            (
                lines("Gradient norm", "grad_norm", alerts=("ConcordGradientSpike", "ConcordGradientCollapse")),
                lines("Loss", "loss"),
                lines("Learning rate", "learning_rate"),
                rates("Steps", "steps", "outcome", alerts=("ConcordNonFiniteStep", "ConcordNonFiniteStepsRepeat")),
            ),
        ),
        Row(
            "Blocks",
            (
                by("Gradient norm by block", "concord_block_grad_norm", "block", wide=24),
                by(
                    "Largest over median block norm",
                    "concord:block_grad_norm:max_over_median",
                    unit="suffix:x",
                    help="How far one block stands out.",
                    alerts=("ConcordBlockHeterogeneity",),
                ),
            ),
        ),
        Row(
            "Gradient searches",
            (
                by(
                    "Searches by outcome",
                    "concord_gradloc_searches_total",
                    "outcome",
                    alerts=("ConcordGradLocLocated", "ConcordGradLocNotSearched"),
                ),
                by("Culprits by type", "concord_gradloc_culprits_total", "type"),
                rates("Passes of searches", "gradloc_search_passes"),
                rates("Time in searches", "gradloc_search_seconds"),
            ),
        ),
        Row(
            "Clips of blocks",
            (
                by("Scale of each block's clip", "concord_block_clip_scale_ratio", "block"),
                by("Threshold of each block's clip", "concord_block_clip_threshold", "block"),
            ),
            needs="trainer.optimizer.clip by block",
        ),
        Row(
            "Attention logits",
            (
                lines("Largest attention logit", "max_attention_logit", alerts=("ConcordAttentionLogits",)),
                by("The five largest heads", "topk(5, concord_block_max_attention_logit)", "block", "head"),
            ),
            needs="trainer.optimizer.qk_clip",
        ),
        Row(
            "Probes",
            (
                by("Update ratio by block", "concord_block_update_ratio", "block", unit="sci"),
                by("Activations by block, RMS", "concord_block_activation_rms", "block"),
                by("Activations by block, kurtosis", "concord_block_activation_kurtosis", "block"),
                by("Busiest expert over the mean", "concord_block_router_load_max_ratio", "block", unit="suffix:x"),
                by("Entropy of the experts' load", "concord_block_router_load_entropy_nats", "block"),
            ),
            needs="trainer.probes; the last two a mixture of experts",
        ),
    ),
    variables=("block",),
)
