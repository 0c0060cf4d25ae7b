"""Signals of layers 1 to 3: data and reward, policy change, numerical updates. Parts of the catalogue in
`orchestrator.metrics.catalogue`."""

from orchestrator.metrics.types import OTHER, Extent, Label, Metric, column, counter, gauge, histogram, optional_column
from trainer.types.gradloc import CulpritType

LENGTH_EDGES = tuple(float(2**power) for power in range(18))
PASS_RATE_EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999, 1.0)
SEARCH_OUTCOMES = ("located", "diffuse", "inconclusive", "clean", "not_searched")
CULPRIT_TYPES = tuple(CulpritType)

CONFIGURATIONS = tuple(str(number) for number in range(15))
"""Numbers of the configurations of evaluations, in the order in which a loop met them."""

DATA_AND_REWARD: tuple[Metric, ...] = (
    column("reward_mean", "reward", 1, "Mean reward of the trained groups."),
    column("reward_std", "reward", 1, "Standard deviation of the trained rewards over trajectories."),
    column("reward_moving_10", "reward", 1, "Mean of reward_mean over the last ten steps."),
    column(
        "reward_mean_dispatched",
        "reward",
        1,
        "Mean reward of all groups up to the oldest unfinished dispatch: free of selection by speed.",
    ),
    column("reward_mean_finished", "reward", 1, "Mean reward of all groups that have finished."),
    column("length_mean", "tokens", 1, "Mean sampled tokens of the trained trajectories."),
    column(
        "length_mean_dispatched",
        "tokens",
        1,
        "Mean sampled tokens up to the oldest unfinished dispatch: free of selection by speed.",
    ),
    column("length_mean_finished", "tokens", 1, "Mean sampled tokens of all finished trajectories."),
    column("length_cap_fraction", "ratio", 1, "Share of trained trajectories that ended at their length limit."),
    column(
        "reward_length_correlation",
        "ratio",
        1,
        "Correlation of reward and sampled tokens within the trained groups; 0 where either does not differ.",
    ),
    column("zero_variance_groups", "ratio", 1, "Share of trained groups whose rewards are all equal."),
    column("all_correct_groups", "ratio", 1, "Share of trained groups whose rewards are all 1 or more."),
    column("all_wrong_groups", "ratio", 1, "Share of trained groups whose rewards are all 0 or less."),
    column(
        "distinct_prompts",
        "ratio",
        1,
        "Share of different prompts among the newest 64 trained groups, or all where there are fewer.",
    ),
    optional_column(
        "eval_score",
        "reward",
        1,
        "Mean reward of the newest evaluation of held-out prompts; -1 before the first.",
        "eval_version",
    ),
    optional_column(
        "eval_stderr", "reward", 1, "Its standard error over prompts; -1 before the first.", "eval_version"
    ),
    optional_column("eval_version", "version", 1, "Version that it scored; -1 before the first."),
    column(
        "eval_fingerprint_changed",
        "changes",
        1,
        "Changes of the evaluation's configuration since the run began: scores across one do not compare.",
    ),
    gauge(
        "evaluation_score",
        "reward",
        1,
        "Score of the newest evaluation, a series of its own for each configuration that the run has met.",
        Label(name="configuration", values=(*CONFIGURATIONS, OTHER)),
    ),
    histogram(
        "response_length_tokens", "tokens", 1, "Sampled tokens of each trajectory in a trained batch.", LENGTH_EDGES
    ),
    histogram(
        "group_pass_rate",
        "ratio",
        1,
        "Share of a group's rewards that are 1 or more, of each group in a trained batch.",
        PASS_RATE_EDGES,
    ),
    gauge(
        "reward_part_mean",
        "reward",
        1,
        "Mean of each named part of the reward in the last step.",
        Label(name="part", extent=Extent.REWARD_PARTS),
    ),
    counter(
        "environment_failures",
        "groups",
        1,
        "Dispatches that failed because the environment raised.",
        Label(name="environment", extent=Extent.ENVIRONMENTS),
    ),
)

POLICY: tuple[Metric, ...] = (
    column("advantage_std", "reward", 2, "Standard deviation of the advantages."),
    column("policy_entropy", "nats", 2, "Mean entropy over the loss's tokens."),
    column("approx_kl", "nats", 2, "Mean k3 of old against new log-probs."),
    column("reference_kl", "nats", 2, "Mean KL estimate to version 0; 0 without a reference."),
    column("clip_fraction_low", "ratio", 2, "Share of loss tokens clipped from below."),
    column("clip_fraction_high", "ratio", 2, "Share of loss tokens clipped from above."),
    gauge(
        "reference_kl_nats",
        "nats",
        2,
        "Mean KL estimate to version 0; only with a reference.",
        Label(name="estimator", values=("k1", "k3")),
    ),
)

NUMERICAL: tuple[Metric, ...] = (
    column("loss", "loss", 3, "Loss of the step: a sum with fixed denominators."),
    column("grad_norm", "norm", 3, "Global gradient norm before the clip."),
    column("learning_rate", "rate", 3, "Learning rate of the step."),
    optional_column(
        "max_attention_logit",
        "logit",
        3,
        "Largest attention logit of all heads before the clip (trainer.optimizer.qk_clip); -1 where it is off.",
    ),
    column(
        "skipped_steps",
        "steps",
        3,
        "Steps not applied since the loop began: non-finite, or skipped by the gradient search.",
    ),
    column(
        "gradloc_runs_located",
        "searches",
        3,
        "Gradient searches since the loop began that named the tokens behind a step's norm.",
    ),
    column(
        "gradloc_runs_diffuse",
        "searches",
        3,
        "Gradient searches since the loop began in which no few tokens dominated.",
    ),
    column(
        "gradloc_runs_inconclusive",
        "searches",
        3,
        "Gradient searches since the loop began that ended with their passes, or looked at suspects only.",
    ),
    column("gradloc_runs_clean", "searches", 3, "Gradient searches since the loop began that ruled every token out."),
    column(
        "gradloc_runs_not_searched",
        "steps",
        3,
        "Steps since the loop began that asked for a gradient search and got none: spike_passes were spent.",
    ),
    column("gradloc_passes", "passes", 3, "Passes of all gradient searches since the loop began."),
    column("gradloc_seconds", "seconds", 3, "Seconds of all gradient searches since the loop began."),
    counter(
        "gradloc_searches",
        "searches",
        3,
        "Steps that asked for a gradient search, by its outcome.",
        Label(name="outcome", values=SEARCH_OUTCOMES),
    ),
    counter(
        "gradloc_culprits",
        "tokens",
        3,
        "Tokens that gradient searches named, by what is odd about them.",
        Label(name="type", values=CULPRIT_TYPES),
    ),
    counter("gradloc_search_passes", "passes", 3, "Passes of gradient searches."),
    counter("gradloc_search_seconds", "seconds", 3, "Seconds of gradient searches."),
    counter(
        "steps",
        "steps",
        3,
        "Optimizer steps; a skipped one was not applied: non-finite, or skipped by the gradient search.",
        Label(name="outcome", values=("applied", "skipped")),
    ),
)

_BLOCK = Label(name="block", extent=Extent.BLOCKS)
_HEAD = Label(name="head", extent=Extent.HEADS)

BLOCKS: tuple[Metric, ...] = (
    gauge("block_grad_norm", "norm", 3, "Norm of the block's gradient before any clip.", _BLOCK),
    gauge(
        "block_clip_scale",
        "ratio",
        3,
        "Factor of the block's gradient by trainer.optimizer.clip, without the global clip.",
        _BLOCK,
    ),
    gauge(
        "block_clip_threshold",
        "norm",
        3,
        "Norm at which the block is clipped; no row where it has no threshold of its own, or none yet.",
        _BLOCK,
    ),
    gauge(
        "block_update_ratio",
        "ratio",
        3,
        "Norm of the step's change of the block's weights over their norm (trainer.probes.update_ratio).",
        _BLOCK,
    ),
    gauge(
        "block_activation_rms",
        "activation",
        3,
        "Root mean square of what the block hands on (trainer.probes.activations).",
        _BLOCK,
    ),
    gauge(
        "block_activation_kurtosis",
        "ratio",
        3,
        "Mean 4th power over squared mean square of the same; 3 for a normal distribution.",
        _BLOCK,
    ),
    gauge(
        "block_router_load_max",
        "ratio",
        3,
        "Busiest expert's share of the block's tokens over the mean's (trainer.probes.router_load).",
        _BLOCK,
    ),
    gauge(
        "block_router_load_entropy",
        "nats",
        3,
        "Entropy of the shares of the block's experts; log of their number where all are alike.",
        _BLOCK,
    ),
    gauge(
        "block_max_attention_logit",
        "logit",
        3,
        "Largest attention logit of a head before the clip (trainer.optimizer.qk_clip).",
        _BLOCK,
        _HEAD,
    ),
)
"""Signals with a value for each block of the model, also in the block parts."""
