"""Reduces the state of the loop to one declared row a step, and to the summary at the end."""

import json
import time
from collections.abc import Mapping

import numpy as np

from orchestrator.dispatch.accounts import Stage
from orchestrator.loop.evaluation import NO_SCORE
from orchestrator.loop.parts import LoopParts
from orchestrator.metrics.learning import SEARCH_OUTCOMES
from orchestrator.observers import StepDone
from orchestrator.run_dir.layout import RunDir, write_atomic
from orchestrator.run_dir.search_records import SearchRecords
from orchestrator.signals.consistency import consistency_row, consistency_summary
from orchestrator.signals.memory import PeakMemory
from rollout.types.dispatch import Totals


class Signals:
    """Observes one loop. Never blocks it."""

    def __init__(self, loop: LoopParts, before: Totals) -> None:
        self._loop = loop
        self._before = before
        self._totals = before
        self._row: dict[str, float] = {}
        self._begun = time.monotonic()
        self._last = self._begun

    def row(self, done: StepDone) -> dict[str, float]:
        """The metric row of an applied step; keys are the catalogue's columns."""
        now = time.monotonic()
        step_s, self._last = now - self._last, now
        report = done.report
        self._totals = Totals(
            steps=self._totals.steps + 1,
            trajectories_trained=self._totals.trajectories_trained + len(report.trained_ids),
            trajectories_masked=self._totals.trajectories_masked + len(report.masked_ids),
            trajectories_dropped=self._totals.trajectories_dropped
            + done.facts.num_trajectories
            - len(report.trained_ids),
        )
        self._row = {
            **self._of_step(done),
            **self._of_loop(),
            **consistency_row(self._loop.consistency, now - self._begun),
            "wall_seconds": now - self._begun,
            "step_seconds": step_s,
            "tokens_per_second": report.num_tokens / step_s,
            "step_wait_seconds": done.phases.wait_s,
            "step_train_seconds": done.phases.train_s,
            "step_publish_seconds": done.phases.publish_s,
            "step_checkpoint_seconds": done.phases.checkpoint_s,
        }
        return self._row

    def live_row(self) -> dict[str, float]:
        """The newest row with what has changed since; before the first step, only what does not need one."""
        wall_s = time.monotonic() - self._begun
        return {
            **self._row,
            **self._of_loop(),
            **consistency_row(self._loop.consistency, wall_s),
            "wall_seconds": wall_s,
        }

    def _of_step(self, done: StepDone) -> dict[str, float]:
        report, facts, accounts = done.report, done.facts, self._loop.accounts
        return {
            "step": report.policy.version,
            "trainer_epoch": report.policy.trainer_epoch,
            "reward_mean": facts.reward_mean,
            "reward_std": facts.reward_std,
            "reward_moving_10": accounts.reward_moving_10,
            "reward_mean_dispatched": accounts.dispatched.reward.value,
            "reward_mean_finished": accounts.finished.reward.value,
            "length_mean": facts.length_mean,
            "length_mean_dispatched": accounts.dispatched.length.value,
            "length_mean_finished": accounts.finished.length.value,
            "length_cap_fraction": facts.length_cap_fraction,
            "reward_length_correlation": facts.reward_length_correlation,
            "distinct_prompts": len(set(accounts.prompts)) / len(accounts.prompts),
            "zero_variance_groups": facts.zero_variance,
            "all_correct_groups": facts.all_correct,
            "all_wrong_groups": facts.all_wrong,
            "advantage_std": report.advantage_std,
            "policy_entropy": report.policy_entropy,
            "approx_kl": report.approx_kl,
            "reference_kl": report.reference_kl,
            "clip_fraction_low": report.clip_fraction_low,
            "clip_fraction_high": report.clip_fraction_high,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "max_attention_logit": max(
                (logit for _, heads in report.attention_logits for logit in heads), default=-1.0
            ),
            "abs_logprob_difference_mean": report.mean_abs_logprob_difference,
            "abs_rollout_difference_mean": report.mean_abs_rollout_difference,
            "abs_engine_difference_mean": report.mean_abs_engine_difference,
            "correction_weight_mean": report.correction_weight_mean,
            "correction_ess": report.correction_ess,
            "correction_zero_fraction": report.correction_zero_fraction,
            "routing_replayed": report.routing_replayed_fraction,
            "routing_fallback": report.routing_fallback_fraction,
            "token_staleness_mean": facts.staleness_mean,
            "token_staleness_max": facts.staleness_max,
            "mixed_version_trajectories": facts.mixed_fraction,
            "generation_seconds": facts.generation_s,
            "reward_seconds": facts.reward_s,
        }

    def _of_loop(self) -> dict[str, float]:
        loop, counts = self._loop, self._loop.book.counts
        return {
            "skipped_steps": loop.training.skipped,
            **_searches(loop.searches),
            "dispatched": counts.total,
            "trained": counts.trained + sum(n for _, n in counts.trained_held),
            "rejected": sum(n for _, n in counts.rejected),
            "failed": sum(n for _, n in counts.failed),
            "in_flight": counts.in_flight - sum(n for _, n in counts.trained_held),
            "running": len(loop.book.pool.running),
            "ready": len(loop.book.pool.ready),
            "admission_capacity": loop.admission.capacity(),
            "trainer_version": loop.training.policy.version,
            "committed_version": loop.publisher.committed.policy.version,
            "weight_updates": loop.accounts.weight_updates,
            "weights_superseded": loop.publisher.superseded,
            "update_pause_seconds": loop.accounts.pauses[-1] if loop.accounts.pauses else 0.0,
            "engine_busy": self.engine_busy(),
            "trainer_busy": loop.accounts.trainer_busy_s / max(1e-9, time.monotonic() - self._begun),
            "replica_restarts": loop.lifecycle.restarts,
            "worker_restarts": loop.collection.restarts,
            "side_file_failures": loop.book.side_files.failures,
            "observing_cpu_seconds": loop.accounts.observing_cpu_s,
            **loop.accounts.speeds.columns(),
            **(NO_SCORE if loop.evaluation is None else loop.evaluation.columns()),
            "evaluation_tokens": 0 if loop.evaluation is None else loop.evaluation.tokens,
            "evaluation_busy": self._evaluation_busy(),
        }

    def engine_busy(self) -> float:
        """Mean share of the wall clock in which a replica generated."""
        busy = self._loop.replicas.busy_s()
        return min(1.0, sum(busy.values()) / len(busy) / max(1e-9, time.monotonic() - self._begun))

    def _evaluation_busy(self) -> float:
        seconds = 0.0 if self._loop.evaluation is None else self._loop.evaluation.seconds
        return seconds / len(self._loop.replicas.busy_s()) / max(1e-9, time.monotonic() - self._begun)

    def summary(self, memory: PeakMemory, metrics_url: str) -> dict[str, object]:
        """The machine-readable result. Counts come from the store; means and rates from this driver's life."""
        loop, counts, accounts = self._loop, self._loop.book.counts, self._loop.accounts
        wall = time.monotonic() - self._begun
        pauses = np.array(accounts.pauses) * 1e3 if accounts.pauses else np.zeros(1)
        return {
            "steps": self._totals.steps,
            "version": loop.training.policy.version,
            "trainer_epoch": loop.book.epoch,
            "reward_first": accounts.reward_first,
            "reward_last": accounts.reward_last,
            "reward_moving_10": accounts.reward_moving_10,
            "dispatched": counts.total,
            "trained": counts.trained + sum(n for _, n in counts.trained_held),
            "rejected": dict(counts.rejected),
            "failed": dict(counts.failed),
            "in_flight": counts.in_flight - sum(n for _, n in counts.trained_held),
            "trajectories": {
                "trained": self._totals.trajectories_trained,
                "masked": self._totals.trajectories_masked,
                "dropped": self._totals.trajectories_dropped,
            },
            "max_token_staleness": accounts.staleness_max,
            "mean_token_staleness": accounts.staleness.value,
            "mixed_version_trajectories": accounts.mixed,
            "mean_length": {stage: sums.length.value for stage, sums in self._stages().items()},
            "mean_reward": {stage: sums.reward.value for stage, sums in self._stages().items()},
            "weight_updates": accounts.weight_updates,
            "update_pause_ms": {"p50": float(np.percentile(pauses, 50)), "p99": float(np.percentile(pauses, 99))},
            "consistency": consistency_summary(loop.consistency),
            "tokens_per_s": accounts.trained_tokens / wall,
            "samples_per_s": accounts.trained_samples / wall,
            "engine_busy": self.engine_busy(),
            "trainer_busy": accounts.trainer_busy_s / wall,
            "wall_s": wall,
            "peak_rss_mb": memory.peak_mb(),
            "replica_restarts": loop.lifecycle.restarts,
            "worker_restarts": loop.collection.restarts,
            "skipped_steps": loop.training.skipped,
            "metrics_url": metrics_url,
        }

    def _stages(self) -> dict[str, Stage]:
        accounts = self._loop.accounts
        return {"dispatched": accounts.dispatched, "finished": accounts.finished, "trained": accounts.trained}


def write_summary(run: RunDir, summary: Mapping[str, object]) -> None:
    """`summary.json`."""
    write_atomic(run.summary, json.dumps(summary, indent=2) + "\n")


def _searches(kept: SearchRecords) -> dict[str, float]:
    return {f"gradloc_runs_{outcome}": kept.outcomes[outcome] for outcome in SEARCH_OUTCOMES} | {
        "gradloc_passes": kept.passes,
        "gradloc_seconds": kept.seconds,
    }
