"""Everything that Prometheus and the trackers are told, read from the loop as it stands and from the newest step. It
serves nothing and blocks nothing.

Counters begin at 0 with this process; numbers "since the run began" are gauges, and columns of the rows.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from orchestrator.config import RunConfig
from orchestrator.loop.loop import Loop
from orchestrator.loop.training import StepDone
from orchestrator.metrics.blocks import block_values
from orchestrator.metrics.catalogue import CATALOGUE, ROW_METRICS
from orchestrator.metrics.consistency import DRIFTS, REASONS
from orchestrator.metrics.distributions import LabelValues, combinations
from orchestrator.metrics.learning import CULPRIT_TYPES, SEARCH_OUTCOMES
from orchestrator.metrics.snapshot import Snapshot
from orchestrator.metrics.system import PHASES, TRAINER_PHASES
from orchestrator.metrics.types import MAX_REWARD_PARTS, OTHER, Extent
from orchestrator.signals.memory import PeakMemory
from orchestrator.signals.replicas import replica_numbers
from orchestrator.signals.rows import Signals
from rollout.types.dispatch import Counts, FailReason, RejectReason
from trainer.types.evidence import GapCause
from trainer.types.step import StepReport, Verdict

Numbers = dict[str, dict[LabelValues, float]]


class LiveSignals:
    """Of one loop, from its beginning to its end."""

    def __init__(self, config: RunConfig, loop: Loop, signals: Signals, memory: PeakMemory) -> None:
        self._loop, self._signals, self._memory = loop, signals, memory
        self._environment, self._max_staleness = config.environment.type, config.staleness.max_staleness
        self._opening: Counts = loop.book.counts
        self._last_step_s = time.time()
        self._steps = 0
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._trainer_phases = dict.fromkeys(TRAINER_PHASES, 0.0)
        self._of_report: Numbers = {}
        self._reward_parts = BoundedParts()
        slots = {"replica": [str(slot) for slot in range(config.engine.replicas)]}
        for metric in CATALOGUE:
            if metric.buckets and any(label.extent is Extent.REPLICAS for label in metric.labels):
                loop.accounts.distributions.begin(metric.name, combinations(metric, slots))

    def step(self, done: StepDone, row: Mapping[str, float]) -> None:
        """An applied step, with its metric row."""
        distributions, phases = self._loop.accounts.distributions, done.phases
        self._last_step_s = time.time()
        self._steps += 1
        distributions.observe("concord_step_duration_seconds", row["step_seconds"])
        for phase, seconds in zip(
            PHASES, (phases.wait_s, phases.train_s, phases.publish_s, phases.checkpoint_s), strict=True
        ):
            self._phases[phase] += seconds
        for phase, seconds in done.report.phases_s:
            self._trainer_phases[phase if phase in TRAINER_PHASES else OTHER] += seconds
        for part, reduced in done.report.log_ratios:
            distributions.add("concord_log_ratio_nats", reduced, part)
        self._of_report = self._read(done.report)

    def _read(self, report: StepReport) -> Numbers:
        """What a report says with labels; gauges, so the newest step's alone."""
        numbers: Numbers = {"concord_reference_kl_nats": {(estimator,): kl for estimator, kl in report.reference_kls}}
        for one in block_values(report):
            labels = (one.block,) if one.head is None else (one.block, str(one.head))
            numbers.setdefault(f"concord_{one.signal}", {})[labels] = one.value
        numbers["concord_reward_part_mean"] = self._reward_parts.means(report.reward_parts)
        return numbers

    def took(self, cpu_s: float) -> None:
        """So many CPU seconds of the driver went into all this."""
        self._loop.accounts.observing_cpu_s += cpu_s

    def snapshot(self, row: Mapping[str, float] | None = None) -> Snapshot:
        """All values now. With the row of a step that has just ended, its columns are those of the row."""
        row, memory = self._signals.live_row() if row is None else row, self._memory.now
        columns = {m.name: {(): float(row[m.column])} for m in ROW_METRICS if m.measured(row)}
        numbers: Numbers = {
            **columns,
            **self._of_report,
            **self._work(),
            **self._time_and_queues(),
            **self._verdicts(),
            **self._score(),
            **self._searches(),
            **self._loop.doctor.numbers(),
            **replica_numbers(self._loop.replicas, self._loop.consistency),
            "concord_actor_memory_bytes": {(name,): float(size) for name, size in memory.items()},
        }
        return Snapshot(
            numbers={name: series for name, series in numbers.items() if series},
            distributions=self._loop.accounts.distributions.copy(),
        )

    def engine_addresses(self) -> dict[int, str]:
        """host:port by slot of engines that serve metrics of their own."""
        return {replica.slot: replica.metrics_address for replica in self._loop.replicas if replica.metrics_address}

    def _work(self) -> Numbers:
        loop, counts, opening = self._loop, self._loop.book.counts, self._opening
        failed = _since(counts.failed, opening.failed)
        return {
            "concord_dispatched_groups_total": {(): float(counts.total - opening.total)},
            "concord_trained_groups_total": {(): float(_trained(counts) - _trained(opening))},
            "concord_rejected_groups_total": _by(RejectReason, _since(counts.rejected, opening.rejected)),
            "concord_failed_groups_total": _by(FailReason, failed),
            "concord_environment_failures_total": {(self._environment,): float(failed[FailReason.ENVIRONMENT])},
            "concord_retried_groups_total": {(): float(loop.accounts.retried)},
            "concord_trained_tokens_total": {(): float(loop.accounts.trained_tokens)},
            "concord_steps_total": {("applied",): float(self._steps), ("skipped",): float(loop.training.skipped)},
            "concord_restarts_total": {
                ("replica",): float(loop.supervision.restarts),
                ("worker",): float(loop.collection.restarts),
                ("auditor",): 0.0 if loop.consistency is None else float(loop.consistency.sums.restarts),
            },
        }

    def _time_and_queues(self) -> Numbers:
        loop = self._loop
        queues = {
            "running": len(loop.book.pool.running),
            "ready": len(loop.book.pool.ready),
            "again": len(loop.book.readmissions),
            "audit": 0 if loop.consistency is None else loop.consistency.num_waiting,
            "publication": loop.publisher.num_waiting,
        }
        return {
            "concord_queue_depth": {(queue,): float(depth) for queue, depth in queues.items()},
            "concord_batch_wait_seconds": {(): loop.training.batch_wait_s},
            "concord_last_step_timestamp_seconds": {(): self._last_step_s},
            "concord_max_staleness": {(): float(self._max_staleness)},
            "concord_step_phase_seconds_total": {(phase,): seconds for phase, seconds in self._phases.items()},
            "concord_trainer_phase_seconds_total": {
                (phase,): seconds for phase, seconds in self._trainer_phases.items()
            },
        }

    def _score(self) -> Numbers:
        evaluation = self._loop.evaluation
        if evaluation is None or evaluation.newest is None:
            return {}
        return {"concord_evaluation_score": {(evaluation.configuration(),): evaluation.newest.score}}

    def _searches(self) -> Numbers:
        kept = self._loop.training.searches
        return {
            "concord_gradloc_searches_total": _by(SEARCH_OUTCOMES, kept.outcomes),
            "concord_gradloc_culprits_total": _by(CULPRIT_TYPES, kept.types),
            "concord_gradloc_search_passes_total": {(): float(kept.passes)},
            "concord_gradloc_search_seconds_total": {(): kept.seconds},
        }

    def _verdicts(self) -> Numbers:
        if self._loop.consistency is None:
            return {}
        sums = self._loop.consistency.sums
        reasons = Counter(dict.fromkeys(REASONS, 0))
        for reason, groups in sums.reasons.items():
            reasons[reason if reason in REASONS else OTHER] += groups
        return {
            "concord_verdicts_total": _by(Verdict, sums.verdicts),
            "concord_verdict_reasons_total": _by(REASONS, reasons),
            "concord_consistency_findings_total": _by(GapCause, sums.findings),
            "concord_tokenizer_drift_total": _by(DRIFTS, {kind: sums.reasons[f"drift_{kind}"] for kind in DRIFTS}),
            "concord_audited_tokens_total": {(): float(sums.scored_tokens)},
        }


class BoundedParts:
    """Parts of the reward, whose names a reward function makes up: the first `MAX_REWARD_PARTS` are told apart, the
    others are added up as `other`."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def means(self, parts: Iterable[tuple[str, float]]) -> dict[LabelValues, float]:
        """A series for each part that is told apart."""
        means: dict[LabelValues, float] = {}
        for part, mean in parts:
            if len(self._names) < MAX_REWARD_PARTS:
                self._names.add(part)
            name = part if part in self._names else OTHER
            means[name,] = means.get((name,), 0.0) + mean
        return means


def _trained(counts: Counts) -> int:
    return counts.trained + sum(groups for _, groups in counts.trained_held)


def _since(now: Iterable[tuple[str, int]], before: Iterable[tuple[str, int]]) -> Counter[str]:
    return Counter(dict(now)) - Counter(dict(before))


def _by(values: Iterable[str], counts: Mapping[str, int]) -> dict[LabelValues, float]:
    """A series for each of `values`, 0 where nothing was counted."""
    return {(str(value),): float(counts.get(value, 0)) for value in values}
