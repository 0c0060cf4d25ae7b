"""The audit loop: ready groups -> evidence and verdicts, one task a service actor.

Takes groups from the audit queue; produces verdicts (mode `gate`: before the group may be trained on; mode `audit`: for
a share, whenever there is time, and the estimator never hears of it); waits for the service. A service that dies or
passes its deadline is replaced. It never reads a token: evidence goes from the service to the store, numbers come here.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence

from actors.ports import AuditorPort, Fleet
from orchestrator.config import DeadlinesConfig
from orchestrator.dispatch.book import Book
from orchestrator.loop.audit_queue import AuditQueue
from orchestrator.loop.gap_watch import GapWatch
from orchestrator.loop.step_audits import AppliedStep, StepAudits
from orchestrator.replicas.replicas import Replicas
from rollout.errors import ConcordError, DeadlineError, ProcessLostError
from rollout.tasks import within
from rollout.types.dispatch import Ending, RejectReason
from rollout.types.trajectory import GroupHeader
from rollout.types.weights import PolicyVersion
from trainer.config.consistency import ConsistencyConfig
from trainer.consistency.service.report import AuditContext, AuditReport, GroupVerdict, ReplicaFacts
from trainer.types.evidence import ANNOTATION_KIND
from trainer.types.step import OldLogprobSource, StepReport, StepRequest, Verdict

EVIDENCE_KIND = "evidence"
"""Annotations of mode `audit`: kept for people, never seen by the trainer."""
MAX_LOST = 3
"""Service actors in a row that may die or hang before the run ends with the reason."""


class AuditSums:
    """What audits have found since the loop began."""

    def __init__(self) -> None:
        self.audited = 0
        self.restarts = 0
        self.degraded_steps = 0
        """Steps of mode `gate` that went on without recomputed log-probs."""
        self.verdicts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        """Audited groups by the codes of what failed in them."""
        self.scored_tokens = 0
        self.busy_s = 0.0
        self.held_versions = 0
        self.held_bytes = 0

    def add(self, report: AuditReport) -> None:
        """An answer of the service."""
        self.audited += len(report.groups)
        self.scored_tokens += report.scored_tokens
        self.busy_s += report.seconds
        self.held_versions, self.held_bytes = report.held_versions, report.held_bytes
        self.reasons.update(reason for group in report.groups for reason in group.reasons)
        self.verdicts.update(str(verdict) for group in report.groups for verdict in group.verdicts)

    def lost_a_service(self) -> None:
        """A service actor died or hung."""
        self.restarts += 1

    def degraded(self) -> None:
        """A step of mode `gate` goes on without recomputed log-probs."""
        self.degraded_steps += 1


class Consistency:
    """The loop's side of the consistency service."""

    def __init__(
        self,
        *,
        config: ConsistencyConfig,
        deadlines: DeadlinesConfig,
        fleet: Fleet,
        book: Book,
        replicas: Replicas,
        queue: AuditQueue,
        gaps: GapWatch,
        steps: StepAudits,
    ) -> None:
        self._config, self._deadlines, self._fleet = config, deadlines, fleet
        self._book, self._replicas = book, replicas
        self.queue, self.gaps, self.steps = queue, gaps, steps
        self.sums = AuditSums()
        self.mode = config.mode
        self.gates = config.mode == "gate"
        self.waives = self.gates and config.when_behind == "audit"
        """Whether groups may go on unscored once they have waited for long."""

    def source_of(self, batch: Sequence[GroupHeader]) -> OldLogprobSource:
        """Where the old log-probs of a step on `batch` come from: recomputed when all of it was scored."""
        audited = self._book.pool.audited
        scored = self.gates and all(header.dispatch_id in audited for header in batch)
        return OldLogprobSource.RECOMPUTED if scored else OldLogprobSource.ROLLOUT

    async def step_taken(self, batch: Sequence[GroupHeader], source: OldLogprobSource, version: int) -> None:
        """A step begins on `batch`; one that `gate` lets go on without scores is an event."""
        if self.gates and source is OldLogprobSource.ROLLOUT:
            self.sums.degraded()
            unscored = sum(header.dispatch_id not in self._book.pool.audited for header in batch)
            fields = {"step": version, "unscored_groups": unscored, "groups": len(batch), "old_logprobs": str(source)}
            await self._book.store.record_event("consistency_degraded", {**fields})

    def step_applied(
        self, batch: Sequence[GroupHeader], before: PolicyVersion, request: StepRequest, report: StepReport
    ) -> None:
        """A step was applied to the policy `before`, and its weights are published."""
        self.steps.applied(batch, before, request, report)
        self.queue.ring()

    async def run(self, index: int) -> None:
        """Audit for ever with service actor `index`, replacing it when it dies; ends by cancellation.

        Raises:
            ConcordError: it died too often in a row.
        """
        lost = 0
        while True:
            starting = self._fleet.new_auditor(index)
            limit_s, key = self._deadlines.trainer_start_s, "deadlines.trainer_start_s"
            port = await within(starting, limit_s, key, f"consistency service {index} to start")
            while (error := await self._audit_next(port)) is None:
                lost = 0
            lost += 1
            await port.kill()
            if lost >= MAX_LOST:
                said = f"consistency service {index} was lost {lost} times in a row: {error}"
                raise ConcordError(f"{said}; set consistency.mode to 'off' to go on without") from error
            self.sums.lost_a_service()
            await self._book.store.record_event("auditor_lost", {"auditor": index, "detail": str(error)})

    async def waive(self) -> None:
        """`gate` with `when_behind = "audit"`: let groups go on unscored after `behind_s`; ends by cancellation."""
        while True:
            if self._book.pool.waive(self.queue.late()):
                self._book.ring()
            await asyncio.sleep(min(1.0, self._config.behind_s / 4))

    async def _audit_next(self, port: AuditorPort) -> ConcordError | None:
        """Audit what waits; answers with what was wrong where the service is lost."""
        if (applied := self.steps.take()) is not None:
            return await self._audit_step(port, applied)
        batch = await self.queue.take()
        if not batch:
            return None
        ids = [header.dispatch_id for header in batch]
        kind = ANNOTATION_KIND if self.gates else EVIDENCE_KIND
        try:
            asked = port.audit(ids, self._context(batch), kind)
            what = f"the consistency service to score {len(batch)} groups"
            report = await within(asked, self._config.deadline_s, "consistency.deadline_s", what)
        except (ProcessLostError, DeadlineError) as error:
            self.queue.put_back(batch)
            return error
        for dispatch_id in ids:
            self.queue.done(dispatch_id)
        self.sums.add(report)
        incarnations = _incarnations(batch)
        for gap in report.gaps:
            await self.gaps.take(gap, incarnations[gap.replica])
        if self.gates:
            await self._let_through(report.groups)
        return None

    async def _audit_step(self, port: AuditorPort, applied: AppliedStep) -> ConcordError | None:
        """Look at an applied step; answers with what was wrong where the service is lost."""
        asked = port.audit_step(applied.dispatch_ids, applied.step)
        what = f"the consistency service to look at step {applied.step.after.version}"
        try:
            found = await within(asked, self._config.deadline_s, "consistency.deadline_s", what)
        except (ProcessLostError, DeadlineError) as error:
            await self.steps.found(None)
            return error
        await self.steps.found(found)
        return None

    def _context(self, batch: Sequence[GroupHeader]) -> AuditContext:
        replicas = [(self._replicas[slot], number) for slot, number in sorted(_incarnations(batch).items())]
        return AuditContext(
            committed=self.queue.committed_of(batch),
            replicas=tuple(
                ReplicaFacts(
                    replica=replica.slot,
                    canary_gap=replica.canary_gap_of(incarnation),
                    canary_tolerance=replica.tolerance_nats,
                    baseline=self.gaps.baseline_of(replica.slot),
                )
                for replica, incarnation in replicas
            ),
        )

    async def _let_through(self, groups: Sequence[GroupVerdict]) -> None:
        refused = [g for g in groups if all(v in (Verdict.REJECT, Verdict.QUARANTINE) for v in g.verdicts)]
        self._book.pool.let_through(scored=[g.dispatch_id for g in groups if g.complete])
        self._book.pool.waive({g.dispatch_id for g in groups if not g.complete})
        await self._book.end([_ending(group) for group in refused])
        self._book.ring()


def _incarnations(batch: Sequence[GroupHeader]) -> dict[int, int]:
    """The incarnation of each slot that sampled a batch of the queue, which mixes none."""
    return {header.replica: header.incarnation for header in batch}


def _ending(group: GroupVerdict) -> Ending:
    """The end of a group of which no trajectory may be trained on; its prompt comes again."""
    quarantined = Verdict.QUARANTINE in group.verdicts
    reason = RejectReason.QUARANTINED if quarantined else RejectReason.INCONSISTENT
    return Ending(dispatch_id=group.dispatch_id, reason=reason, detail=", ".join(group.reasons), readmit=True)
