"""Reduces the state of the loop to one declared row a step, and to the summary at the end."""

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from orchestrator.dispatch.accounts import Stage
from orchestrator.loop.auditing import Consistency
from orchestrator.loop.parts import LoopParts
from orchestrator.metrics.catalogue import ROW_METRICS, at_step, now
from orchestrator.metrics.state import Moment, Series
from orchestrator.observers import StepDone
from orchestrator.run_dir.history import RunEnd
from orchestrator.signals.memory import PeakMemory
from orchestrator.signals.moments import Moments
from rollout.types.dispatch import Totals


class Signals:
    """Observes one loop. Never blocks it."""

    def __init__(self, loop: LoopParts, before: Totals) -> None:
        self._loop = loop
        self._totals = before
        self._moments = Moments(loop)
        self.newest_step: Mapping[str, Series] = {}
        """What the newest step says, by name of the metric; empty before the first."""

    def row(self, done: StepDone) -> dict[str, float]:
        """The metric row of an applied step; keys are the catalogue's columns."""
        trained, masked = len(done.report.trained_ids), len(done.report.masked_ids)
        self._totals = Totals(
            steps=self._totals.steps + 1,
            trajectories_trained=self._totals.trajectories_trained + trained,
            trajectories_masked=self._totals.trajectories_masked + masked,
            trajectories_dropped=self._totals.trajectories_dropped + done.facts.num_trajectories - trained,
        )
        self.newest_step = at_step(self._moments.step(done))
        found = {**self.newest_step, **now(self.moment())}
        return {metric.column: found[metric.name][()] for metric in ROW_METRICS}

    def moment(self) -> Moment:
        """The loop as it stands."""
        return self._moments.now()

    def summary(self, memory: PeakMemory, metrics_url: str, end: RunEnd) -> dict[str, object]:
        """The machine-readable result of a run that ended so. Counts come from the store; means and rates from this
        driver's life."""
        loop, counts, accounts, moment = self._loop, self._loop.book.counts, self._loop.accounts, self.moment()
        wall = moment.wall_s
        pauses = np.array(accounts.pauses) * 1e3 if accounts.pauses else np.zeros(1)
        return {
            "steps": self._totals.steps,
            "version": loop.training.policy.version,
            "ended": asdict(end),
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
            "consistency": _consistency(loop.consistency),
            "tokens_per_s": accounts.trained_tokens / wall,
            "samples_per_s": accounts.trained_samples / wall,
            "engine_busy": moment.engine_busy,
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


def _consistency(consistency: Consistency | None) -> dict[str, object]:
    """The `consistency` object of the summary."""
    if consistency is None:
        return {"mode": "off"}
    sums = consistency.sums
    return {
        "mode": consistency.mode,
        "audited_groups": sums.audited,
        "skipped_groups": consistency.queue.skipped,
        "verdicts": dict(sums.verdicts),
        "findings": dict(consistency.gaps.findings),
        "degraded_steps": sums.degraded_steps,
        "gap_mean_nats": {str(slot): gap.mean_abs for slot, gap in sorted(consistency.gaps.newest.items())},
    }
