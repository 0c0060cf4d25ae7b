"""The loop as the accessors of metrics read it: each step that ends, and how things stand now. Nothing else looks into
the loop for a metric."""

import time
from collections.abc import Iterable

from orchestrator.loop.auditing import AuditSums, Consistency
from orchestrator.loop.evaluation import NO_SCORE
from orchestrator.loop.parts import LoopParts
from orchestrator.metrics.state import Ended, LabelValues, Moment, Series
from orchestrator.metrics.system import PHASES, TRAINER_PHASES
from orchestrator.metrics.types import MAX_REWARD_PARTS, OTHER
from orchestrator.observers import StepDone


class Moments:
    """Moments of one loop, from its beginning to its end. Never blocks it."""

    def __init__(self, loop: LoopParts) -> None:
        self._loop = loop
        self._opening = loop.book.counts
        self._begun = self._last = time.monotonic()
        self._started_s = self._last_step_s = time.time()
        self._steps = 0
        self._phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._trainer_phases: dict[str, float] = dict.fromkeys(TRAINER_PHASES, 0.0)
        self._reward_parts = BoundedParts()

    @property
    def wall_s(self) -> float:
        """Wall clock since the loop began."""
        return time.monotonic() - self._begun

    def step(self, done: StepDone) -> Ended:
        """A step was applied."""
        now, phases, accounts = time.monotonic(), done.phases, self._loop.accounts
        seconds, self._last, self._last_step_s = now - self._last, now, time.time()
        self._steps += 1
        spent = (phases.wait_s, phases.train_s, phases.publish_s, phases.checkpoint_s)
        for phase, spent_s in zip(PHASES, spent, strict=True):
            self._phases[phase] += spent_s
        for phase, inside_s in done.report.phases_s:
            self._trainer_phases[phase if phase in TRAINER_PHASES else OTHER] += inside_s
        stages = {"dispatched": accounts.dispatched, "finished": accounts.finished}
        return Ended(
            report=done.report,
            facts=done.facts,
            phases=phases,
            seconds=seconds,
            reward_moving_10=accounts.reward_moving_10,
            mean_reward={stage: sums.reward.value for stage, sums in stages.items()},
            mean_length={stage: sums.length.value for stage, sums in stages.items()},
            prompts=accounts.prompts,
            reward_parts=self._reward_parts.means(done.report.reward_parts),
        )

    def now(self) -> Moment:
        """How things stand."""
        loop, book, accounts, training = self._loop, self._loop.book, self._loop.accounts, self._loop.training
        consistency, evaluation = loop.consistency, loop.evaluation
        sums = AuditSums() if consistency is None else consistency.sums
        return Moment(
            wall_s=self.wall_s,
            counts=book.counts,
            opening=self._opening,
            queues=self._queues(),
            admission_capacity=loop.admission.capacity(),
            trainer_version=training.policy.version,
            committed_version=loop.publisher.committed.policy.version,
            weight_updates=accounts.weight_updates,
            weights_superseded=loop.publisher.superseded,
            longest_pause_s=accounts.longest_pause_s,
            trained_tokens=accounts.trained_tokens,
            store_s=accounts.store_s,
            retried=accounts.retried,
            trainer_busy_s=accounts.trainer_busy_s,
            replica_busy_s=loop.replicas.busy_s(),
            observing_cpu_s=accounts.observing_cpu_s,
            speeds=accounts.speeds.columns(),
            steps=self._steps,
            skipped=training.skipped,
            batch_wait_s=training.batch_wait_s,
            last_step_s=self._last_step_s,
            last_step_age_s=time.monotonic() - self._last,
            started_s=self._started_s,
            phases=self._phases,
            trainer_phases=self._trainer_phases,
            searches=loop.searches,
            side_file_failures=book.side_files.failures,
            restarts=self._restarts(sums.restarts),
            evaluation=NO_SCORE if evaluation is None else evaluation.columns(),
            scores={}
            if evaluation is None or evaluation.newest is None
            else {(evaluation.configuration(),): evaluation.newest.score},
            evaluation_tokens=0 if evaluation is None else evaluation.tokens,
            evaluation_s=0.0 if evaluation is None else evaluation.seconds,
            audits=sums,
            audits_skipped=0 if consistency is None else consistency.queue.skipped,
            findings={} if consistency is None else consistency.gaps.findings,
            newest_gaps={} if consistency is None else consistency.gaps.newest,
            audits_run=consistency is not None,
            baselines={} if consistency is None else _baselines(consistency),
            multiples={} if consistency is None else _multiples(consistency),
            step_audit=None if consistency is None else consistency.steps.newest,
            against_evidence=0.0 if consistency is None else consistency.steps.evidence,
            audited_steps=0 if consistency is None else consistency.steps.audited,
            sampler_evidence=None if consistency is None else consistency.gaps.sampler.evidence,
            repeat_evidence=None if consistency is None else consistency.gaps.sampler.repeat_evidence,
            replicas=tuple(loop.replicas),
            diagnosis=loop.doctor.numbers(),
        )

    def _queues(self) -> dict[str, int]:
        loop, book = self._loop, self._loop.book
        return {
            "running": len(book.pool.running),
            "ready": len(book.pool.ready),
            "again": len(book.readmissions),
            "audit": 0 if loop.consistency is None else len(loop.consistency.queue),
            "publication": loop.publisher.num_waiting,
        }

    def _restarts(self, auditors: int) -> dict[str, int]:
        loop = self._loop
        return {"replica": loop.lifecycle.restarts, "worker": loop.collection.restarts, "auditor": auditors}


def _baselines(consistency: Consistency) -> dict[int, float]:
    gaps = [gap for gap in consistency.gaps.newest.values() if gap.num_tokens]
    found = {gap.replica: consistency.gaps.baseline_of(gap.replica) for gap in gaps}
    return {slot: baseline.mean_abs for slot, baseline in found.items() if baseline is not None}


def _multiples(consistency: Consistency) -> dict[int, float]:
    gaps = [gap for gap in consistency.gaps.newest.values() if gap.num_tokens]
    found = {gap.replica: consistency.gaps.baseline_multiple(gap) for gap in gaps}
    return {slot: multiple for slot, multiple in found.items() if multiple is not None}


class BoundedParts:
    """Parts of the reward, whose names a reward function makes up: the first `MAX_REWARD_PARTS` keep their names, the
    others are added up as `other`."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def means(self, parts: Iterable[tuple[str, float]]) -> Series:
        """A series for each part that keeps its name, and one for the others together."""
        means: dict[LabelValues, float] = {}
        for part, mean in parts:
            if len(self._names) < MAX_REWARD_PARTS:
                self._names.add(part)
            name = part if part in self._names else OTHER
            means[name,] = means.get((name,), 0.0) + mean
        return means
