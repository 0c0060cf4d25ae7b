"""Signals of layers 1 to 3: data and reward, policy change, numerical updates. Parts of the catalogue in
`orchestrator.metrics.catalogue`."""

from collections.abc import Callable, Iterable

from orchestrator.metrics.state import Series
from orchestrator.metrics.types import (
    OTHER,
    UNMEASURED,
    CatalogueSection,
    Extent,
    Label,
    block_gauge,
    by,
    column,
    counter,
    gauge,
    histogram,
    single,
    step_column,
    step_gauge,
    total_column,
)
from rollout.types.dispatch import FailReason
from trainer.types.gradloc import CulpritType
from trainer.types.step import StepReport

LENGTH_EDGES = tuple(float(2**power) for power in range(18))
PASS_RATE_EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999, 1.0)
SEARCH_OUTCOMES = ("located", "diffuse", "inconclusive", "clean", "not_searched")
CULPRIT_TYPES = tuple(CulpritType)

CONFIGURATIONS = tuple(str(number) for number in range(15))
"""Numbers of the configurations of evaluations, in the order in which a loop met them."""


class DataAndReward(CatalogueSection, layer=1):
    """Whether there is something to learn, and whether what is learned is what was meant."""

    reward_mean = step_column("reward", lambda step: step.facts.reward_mean)
    """Mean reward of the trained groups."""
    reward_std = step_column("reward", lambda step: step.facts.reward_std)
    """Standard deviation of the rewards of all trajectories in the step's batch."""
    reward_moving_10 = step_column("reward", lambda step: step.reward_moving_10)
    """Mean of reward_mean over the last ten steps."""
    reward_mean_dispatched = step_column("reward", lambda step: step.mean_reward["dispatched"])
    """Mean reward of all groups up to the oldest unfinished dispatch: free of selection by speed."""
    reward_mean_finished = step_column("reward", lambda step: step.mean_reward["finished"])
    """Mean reward of all groups that have finished."""
    length_mean = step_column("tokens", lambda step: step.facts.length_mean)
    """Mean sampled tokens of all trajectories in the step's batch."""
    length_mean_dispatched = step_column("tokens", lambda step: step.mean_length["dispatched"])
    """Mean sampled tokens up to the oldest unfinished dispatch: free of selection by speed."""
    length_mean_finished = step_column("tokens", lambda step: step.mean_length["finished"])
    """Mean sampled tokens of all finished trajectories."""
    length_cap_fraction = step_column("ratio", lambda step: step.facts.length_cap_fraction)
    """Share of all trajectories in the step's batch that ended at their length limit."""
    length_cut_fraction = step_column("ratio", lambda step: step.facts.length_cut_fraction)
    """Share of all trajectories in the step's batch that ended by length with fewer tokens than
    sampling.max_new_tokens: the context was used up, or the engine's limit is another one."""
    sample_repeats = step_column("ratio", lambda step: step.report.sample_repeats)
    """Share of pairs of samples of one group that are the same, token by token."""
    sample_repeats_expected = step_column("ratio", lambda step: step.report.sample_repeats_expected)
    """The same, as independent samples would have it: the mean probability of a sample."""
    reward_length_correlation = step_column("correlation", lambda step: step.facts.reward_length_correlation)
    """Correlation of reward and sampled tokens within the trained groups; 0 where either does not differ."""
    zero_variance_groups = step_column("ratio", lambda step: step.facts.zero_variance)
    """Share of trained groups whose rewards are all equal."""
    all_correct_groups = step_column("ratio", lambda step: step.facts.all_correct)
    """Share of trained groups whose rewards are all 1 or more."""
    all_wrong_groups = step_column("ratio", lambda step: step.facts.all_wrong)
    """Share of trained groups whose rewards are all 0 or less."""
    distinct_prompts = step_column("ratio", lambda step: len(set(step.prompts)) / len(step.prompts))
    """Share of different prompts among the newest 64 trained groups, or all where there are fewer."""
    eval_score = column("reward", lambda now: now.evaluation["eval_score"], optional="eval_version")
    """Mean reward of the newest evaluation of held-out prompts; -1 before the first."""
    eval_stderr = column("reward", lambda now: now.evaluation["eval_stderr"], optional="eval_version")
    """Standard error over prompts of the newest evaluation's score; -1 before the first."""
    eval_version = column("version", lambda now: now.evaluation["eval_version"], optional=True)
    """Version that the newest evaluation scored; -1 before the first."""
    eval_fingerprint_changed = total_column("changes", lambda now: now.evaluation["eval_fingerprint_changed"])
    """Changes of the evaluation's configuration since the run began: scores across one do not compare."""
    evaluation_score = gauge(
        "reward", lambda now: now.scores, Label(name="configuration", values=(*CONFIGURATIONS, OTHER))
    )
    """Score of the newest evaluation, a series of its own for each configuration that the run has met."""
    response_length_tokens = histogram("tokens", LENGTH_EDGES)
    """Sampled tokens of each trajectory in a trained batch."""
    group_pass_rate = histogram("ratio", PASS_RATE_EDGES)
    """Share of a group's rewards that are 1 or more, of each group in a trained batch."""
    reward_part_mean = step_gauge(
        "reward", lambda step: step.reward_parts, Label(name="part", extent=Extent.REWARD_PARTS)
    )
    """Mean of each named part of the reward in the last step."""
    environment_failures = counter(
        "groups",
        lambda now: {(now.environment,): now.failed.get(FailReason.ENVIRONMENT, 0)},
        Label(name="environment", extent=Extent.ENVIRONMENTS),
    )
    """Dispatches that failed because the environment raised."""


class PolicyChange(CatalogueSection, layer=2):
    """How far a step moves the policy."""

    advantage_std = step_column("reward", lambda step: step.report.advantage_std)
    """Standard deviation of the advantages."""
    policy_entropy = step_column("nats", lambda step: step.report.policy_entropy)
    """Mean entropy over the loss's tokens."""
    approx_kl = step_column("nats", lambda step: step.report.approx_kl)
    """Mean k3 of old against new log-probs."""
    reference_kl = step_column("nats", lambda step: step.report.reference_kl)
    """Mean KL estimate to version 0; 0 without a reference."""
    clip_fraction_low = step_column("ratio", lambda step: step.report.clip_fraction_low)
    """Share of loss tokens clipped from below."""
    clip_fraction_high = step_column("ratio", lambda step: step.report.clip_fraction_high)
    """Share of loss tokens clipped from above."""
    algorithm_statistic = step_gauge(
        "statistic",
        lambda step: {(name,): value for name, value in step.report.statistics},
        Label(name="statistic", extent=Extent.STATISTICS),
    )
    """What the algorithm measures of its loss tokens, mean of the last step, by the name that it declares."""
    reference_kl_estimate = step_gauge(
        "nats",
        lambda step: {(estimator,): kl for estimator, kl in step.report.reference_kls},
        Label(name="estimator", values=("k1", "k3")),
    )
    """Mean KL estimate to version 0; only with a reference."""


class NumericalUpdates(CatalogueSection, layer=3):
    """Losses, gradients, and the searches for what is behind a gradient."""

    loss = step_column("loss", lambda step: step.report.loss)
    """Loss of the step: a sum with fixed denominators."""
    grad_norm = step_column("norm", lambda step: step.report.grad_norm)
    """Global gradient norm before the clip."""
    learning_rate = step_column("rate", lambda step: step.report.learning_rate)
    """Learning rate of the step."""
    max_attention_logit = step_column(
        "logit",
        lambda step: max((logit for _, heads in step.report.attention_logits for logit in heads), default=UNMEASURED),
        optional=True,
    )
    """Largest attention logit of all heads before the clip (trainer.optimizer.qk_clip); -1 where it is off."""
    skipped_steps = total_column("steps", lambda now: now.skipped)
    """Steps not applied since the loop began: non-finite, or skipped by the gradient search."""
    gradloc_runs_located = total_column("searches", lambda now: now.searches.outcomes.get("located", 0))
    """Gradient searches since the loop began that named the tokens behind a step's norm."""
    gradloc_runs_diffuse = total_column("searches", lambda now: now.searches.outcomes.get("diffuse", 0))
    """Gradient searches since the loop began in which no few tokens dominated."""
    gradloc_runs_inconclusive = total_column("searches", lambda now: now.searches.outcomes.get("inconclusive", 0))
    """Gradient searches since the loop began that ended with their passes, or looked at suspects only."""
    gradloc_runs_clean = total_column("searches", lambda now: now.searches.outcomes.get("clean", 0))
    """Gradient searches since the loop began that ruled every token out."""
    gradloc_runs_not_searched = total_column("steps", lambda now: now.searches.outcomes.get("not_searched", 0))
    """Steps since the loop began that asked for a gradient search and got none: spike_passes were spent."""
    gradloc_passes = total_column("passes", lambda now: now.searches.passes)
    """Passes of all gradient searches since the loop began."""
    gradloc_seconds = total_column("seconds", lambda now: now.searches.seconds)
    """Seconds of all gradient searches since the loop began."""
    gradloc_searches = counter(
        "searches",
        lambda now: by(SEARCH_OUTCOMES, now.searches.outcomes),
        Label(name="outcome", values=SEARCH_OUTCOMES),
    )
    """Steps that asked for a gradient search, by its outcome."""
    gradloc_culprits = counter(
        "culprits", lambda now: by(CULPRIT_TYPES, now.searches.types), Label(name="type", values=CULPRIT_TYPES)
    )
    """Tokens that gradient searches named, by what is odd about them."""
    gradloc_search_passes = counter("passes", lambda now: single(now.searches.passes))
    """Passes of gradient searches."""
    gradloc_search_seconds = counter("seconds", lambda now: single(now.searches.seconds))
    """Seconds of gradient searches."""
    steps = counter(
        "steps",
        lambda now: {("applied",): now.steps, ("skipped",): now.skipped},
        Label(name="outcome", values=("applied", "skipped")),
    )
    """Optimizer steps; a skipped one was not applied: non-finite, or skipped by the gradient search."""


_BLOCK = Label(name="block", extent=Extent.BLOCKS)
_HEAD = Label(name="head", extent=Extent.HEADS)


def _each(values: Callable[[StepReport], Iterable[tuple[str, float | None]]]) -> Callable[[StepReport], Series]:
    return lambda report: {(block,): value for block, value in values(report) if value is not None}


def _probed(probe: str) -> Callable[[StepReport], Series]:
    return lambda report: {(block,): value for name, block, value in report.probes if name == probe}


def _of_heads(report: StepReport) -> Series:
    return {(block, str(head)): logit for block, heads in report.attention_logits for head, logit in enumerate(heads)}


class Blocks(CatalogueSection, layer=3):
    """Signals with a value for each block of the model, also in the block parts."""

    block_grad_norm = block_gauge("norm", _each(lambda report: report.block_norms), _BLOCK)
    """Norm of the block's gradient before any clip."""
    block_clip_scale = block_gauge("ratio", _each(lambda report: report.block_scales), _BLOCK)
    """Factor of the block's gradient by trainer.optimizer.clip, without the global clip."""
    block_clip_threshold = block_gauge("norm", _each(lambda report: report.block_thresholds), _BLOCK)
    """Norm at which the block is clipped; no row where it has no threshold of its own, or none yet."""
    block_update_ratio = block_gauge("ratio", _probed("update_ratio"), _BLOCK)
    """Norm of the step's change of the block's weights over their norm (trainer.probes.update_ratio)."""
    block_activation_rms = block_gauge("activation", _probed("activation_rms"), _BLOCK)
    """Root mean square of what the block hands on (trainer.probes.activations)."""
    block_activation_kurtosis = block_gauge("kurtosis", _probed("activation_kurtosis"), _BLOCK)
    """Mean 4th power over squared mean square of the same; 3 for a normal distribution."""
    block_router_load_max = block_gauge("ratio", _probed("router_load_max"), _BLOCK)
    """Busiest expert's share of the block's tokens over the mean's (trainer.probes.router_load)."""
    block_router_load_entropy = block_gauge("nats", _probed("router_load_entropy"), _BLOCK)
    """Entropy of the shares of the block's experts; log of their number where all are alike."""
    block_max_attention_logit = block_gauge("logit", _of_heads, _BLOCK, _HEAD)
    """Largest attention logit of a head before the clip (trainer.optimizer.qk_clip)."""
