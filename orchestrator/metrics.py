"""The catalogue of signals: every name once, with type, unit, help, labels and the layer of diagnosis it belongs to.

Values ride on reports and are reduced once a step; nothing is drawn or exported that is not declared here.
"""

from dataclasses import dataclass
from enum import StrEnum


class MetricType(StrEnum):
    """Prometheus types."""

    GAUGE = "gauge"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One declared signal."""

    name: str
    """Prometheus name: `concord_`, base units, `_total` for counters."""
    type: MetricType
    unit: str
    help: str
    diagnosis_layer: int
    """1 data and reward, 2 policy change, 3 numerical updates, 4 training system."""
    labels: tuple[str, ...] = ()
    """Bounded sets only; never an id."""

    @property
    def column(self) -> str:
        """Name in the metric parts."""
        return self.name.removeprefix("concord_")


def _gauge(name: str, unit: str, diagnosis_layer: int, help: str, labels: tuple[str, ...] = ()) -> Metric:
    return Metric(name=f"concord_{name}", type=MetricType.GAUGE, unit=unit, help=help, diagnosis_layer=diagnosis_layer, labels=labels)


CATALOGUE: tuple[Metric, ...] = (
    _gauge("step", "steps", 4, "Optimizer step that this row describes; equals the version it produced."),
    _gauge("trainer_epoch", "epochs", 4, "Trainer epoch of the step."),
    _gauge("wall_seconds", "seconds", 4, "Since the start of the training loop."),
    _gauge("reward_mean", "reward", 1, "Mean reward of the trained groups."),
    _gauge("reward_std", "reward", 1, "Standard deviation of the trained rewards over trajectories."),
    _gauge("reward_moving_10", "reward", 1, "Mean of reward_mean over the last ten steps."),
    _gauge("reward_mean_dispatched", "reward", 1, "Mean reward of all groups up to the oldest unfinished dispatch: free of selection by speed."),
    _gauge("reward_mean_finished", "reward", 1, "Mean reward of all groups that have finished."),
    _gauge("length_mean", "tokens", 1, "Mean sampled tokens of the trained trajectories."),
    _gauge("length_mean_dispatched", "tokens", 1, "Mean sampled tokens up to the oldest unfinished dispatch: free of selection by speed."),
    _gauge("length_mean_finished", "tokens", 1, "Mean sampled tokens of all finished trajectories."),
    _gauge("length_cap_fraction", "ratio", 1, "Share of trained trajectories that ended at their length limit."),
    _gauge("zero_variance_groups", "ratio", 1, "Share of trained groups whose rewards are all equal."),
    _gauge("all_correct_groups", "ratio", 1, "Share of trained groups whose rewards are all 1 or more."),
    _gauge("all_wrong_groups", "ratio", 1, "Share of trained groups whose rewards are all 0 or less."),
    _gauge("advantage_std", "reward", 2, "Standard deviation of the advantages."),
    _gauge("policy_entropy", "nats", 2, "Mean entropy over the loss's tokens."),
    _gauge("approx_kl", "nats", 2, "Mean k3 of old against new log-probs."),
    _gauge("reference_kl", "nats", 2, "Mean KL estimate to version 0; 0 without a reference."),
    _gauge("clip_fraction_low", "ratio", 2, "Share of loss tokens clipped from below."),
    _gauge("clip_fraction_high", "ratio", 2, "Share of loss tokens clipped from above."),
    _gauge("loss", "loss", 3, "Loss of the step: a sum with fixed denominators."),
    _gauge("grad_norm", "norm", 3, "Global gradient norm before the clip."),
    _gauge("learning_rate", "rate", 3, "Learning rate of the step."),
    _gauge("max_attention_logit", "logit", 3, "Largest attention logit of all heads before the clip (trainer.optimizer.qk_clip); -1 where it is off."),
    _gauge("skipped_steps", "steps", 3, "Steps not applied since the run began (non-finite)."),
    _gauge("abs_logprob_difference_mean", "nats", 4, "Mean |log pi_now - old log-prob| over the loss's tokens: staleness and engine together."),
    _gauge("abs_rollout_difference_mean", "nats", 4, "Mean |log pi_now - rollout log-prob| over the loss's tokens: |d_total|."),
    _gauge("abs_engine_difference_mean", "nats", 4, "Mean |recomputed - rollout log-prob| over the loss's tokens: |d_engine|; 0 where nothing was recomputed."),
    _gauge("correction_weight_mean", "ratio", 4, "Mean importance weight of the loss's tokens after the correction."),
    _gauge("correction_ess", "ratio", 4, "Effective sample size of these weights, as a fraction of the tokens."),
    _gauge("correction_zero_fraction", "ratio", 4, "Share of the loss's tokens that the correction takes out."),
    _gauge("routing_replayed", "ratio", 4, "Share of the trained inputs that ran on the engine's experts (trainer.replay_routing); 0 without a replay."),
    _gauge("routing_fallback", "ratio", 4, "Share of them that fell back to the trainer's own because the engine's are missing; 0 without a replay."),
    _gauge("consistency_gap_mean", "nats", 4, "Mean |d_engine| of the newest audit, the worst replica's; -1 before the first."),
    _gauge("consistency_gap_k3", "nats", 4, "Mean k3 of d_engine of the newest audit, the worst replica's; -1 before the first."),
    _gauge("consistency_gap_ess", "ratio", 4, "Effective sample size of the raw engine ratios, the worst replica's; -1 before the first."),
    _gauge("consistency_gap_tail", "ratio", 4, "F(2): share of tokens whose engine ratio is outside [1/2, 2], the worst replica's; -1 before the first."),
    _gauge("consistency_baseline_multiple", "ratio", 4, "Mean |d_engine| over the replica's own at the start, the worst replica's; -1 before the first."),
    _gauge("consistency_routing_mismatch", "ratio", 4, "Share of (token, block) cells whose experts differ, the worst replica's; -1 where none was compared."),
    _gauge("consistency_routing_any_mismatch", "ratio", 4, "Share of tokens whose experts differ in some block, the worst replica's; -1: none compared."),
    _gauge("consistency_routing_coverage", "ratio", 4, "Share of sampled tokens with whole routing evidence, the worst replica's; -1 where none is expected."),
    _gauge("consistency_audited_groups", "groups", 4, "Groups that the consistency service has scored since the loop began."),
    _gauge("consistency_skipped_groups", "groups", 4, "Groups chosen for an audit and let go because the service was behind."),
    _gauge("consistency_masked", "trajectories", 4, "Trajectories with verdict mask since the loop began."),
    _gauge("consistency_rejected", "trajectories", 4, "Trajectories with verdict reject since the loop began."),
    _gauge("consistency_quarantined", "trajectories", 4, "Trajectories with verdict quarantine since the loop began."),
    _gauge("consistency_degraded_steps", "steps", 4, "Steps of mode gate that went on without recomputed log-probs."),
    _gauge("consistency_busy", "ratio", 4, "Share of the wall clock in which the service worked, since the loop began."),
    _gauge("consistency_held_versions", "versions", 4, "Weight versions in the service's memory."),
    _gauge("consistency_held_bytes", "bytes", 4, "Weights in the service's memory."),
    _gauge("auditor_restarts", "restarts", 4, "Consistency service actors replaced since the loop began."),
    _gauge("token_staleness_mean", "steps", 4, "Mean staleness of the trained tokens."),
    _gauge("token_staleness_max", "steps", 4, "Staleness of the oldest trained token."),
    _gauge("mixed_version_trajectories", "ratio", 4, "Share of trained trajectories that span more than one version."),
    _gauge("dispatched", "groups", 4, "Dispatches recorded since the run began."),
    _gauge("trained", "groups", 4, "Dispatches trained on since the run began."),
    _gauge("rejected", "groups", 4, "Dispatches rejected since the run began."),
    _gauge("failed", "groups", 4, "Dispatches failed since the run began."),
    _gauge("in_flight", "groups", 4, "Dispatches that have not ended."),
    _gauge("running", "groups", 4, "Dispatches in generation or reward."),
    _gauge("ready", "groups", 4, "Finished groups that wait for the trainer."),
    _gauge("admission_capacity", "groups", 4, "Groups that may start now."),
    _gauge("trainer_version", "version", 4, "Version of the trainer."),
    _gauge("committed_version", "version", 4, "Version that the healthy engines have confirmed."),
    _gauge("weight_updates", "updates", 4, "Committed publications since the loop began."),
    _gauge("weights_superseded", "updates", 4, "Publications that a newer one replaced before an engine saw them."),
    _gauge("update_pause_seconds", "seconds", 4, "Longest pause of a replica in the last weight update."),
    _gauge("tokens_per_second", "tokens/s", 4, "Trained tokens over the seconds of the step."),
    _gauge("engine_busy", "ratio", 4, "Share of the wall clock in which a replica generated, mean over replicas, since the loop began."),
    _gauge("trainer_busy", "ratio", 4, "Share of the wall clock in which the trainer worked, since the loop began."),
    _gauge("step_seconds", "seconds", 4, "Wall clock from the end of the step before to the end of this one."),
    _gauge("step_wait_seconds", "seconds", 4, "Of it, waiting for a batch."),
    _gauge("step_train_seconds", "seconds", 4, "Of it, lease, decode, forward, backward and optimizer."),
    _gauge("step_publish_seconds", "seconds", 4, "Of it, commit record and publication to disk."),
    _gauge("step_checkpoint_seconds", "seconds", 4, "Of it, checkpoint."),
    _gauge("generation_seconds", "seconds", 4, "Mean generation time of the trained groups."),
    _gauge("reward_seconds", "seconds", 4, "Mean time of the trained groups in a reward worker."),
    _gauge("replica_restarts", "restarts", 4, "Engine replicas restarted since the loop began."),
    _gauge("worker_restarts", "restarts", 4, "Episode workers replaced since the loop began."),
)

BLOCK_CATALOGUE: tuple[Metric, ...] = (
    _gauge("block_grad_norm", "norm", 3, "Norm of the block's gradient before any clip.", ("block",)),
    _gauge("block_clip_scale", "ratio", 3, "Factor of the block's gradient by trainer.optimizer.clip, without the global clip.", ("block",)),
    _gauge("block_clip_threshold", "norm", 3, "Norm at which the block is clipped; no row where it has no threshold of its own, or none yet.", ("block",)),
    _gauge("block_update_ratio", "ratio", 3, "Norm of the step's change of the block's weights over their norm (trainer.probes.update_ratio).", ("block",)),
    _gauge("block_activation_rms", "activation", 3, "Root mean square of what the block hands on (trainer.probes.activations).", ("block",)),
    _gauge("block_activation_kurtosis", "ratio", 3, "Mean 4th power over squared mean square of the same; 3 for a normal distribution.", ("block",)),
    _gauge("block_router_load_max", "ratio", 3, "Busiest expert's share of the block's tokens over the mean's (trainer.probes.router_load).", ("block",)),
    _gauge("block_router_load_entropy", "nats", 3, "Entropy of the shares of the block's experts; log of their number where all are alike.", ("block",)),
    _gauge("block_max_attention_logit", "logit", 3, "Largest attention logit of a head before the clip (trainer.optimizer.qk_clip).", ("block", "head")),
)
"""Signals with a value for each block of the model, in the block parts."""

COLUMNS: tuple[str, ...] = tuple(metric.column for metric in CATALOGUE)
