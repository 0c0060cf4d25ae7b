"""The audit loop: ready groups -> evidence and verdicts, one task a service actor.

Consumes ready headers whose policies the ledger has committed; produces verdicts (mode `gate`: before the group may be
trained on; mode `audit`: for a share, whenever there is time, and the estimator never hears of it); waits for the
service. A service that dies or passes its deadline is replaced. It never reads a token: evidence goes from the service
to the store, numbers come here.
"""

import asyncio
import hashlib
import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from actors.ports import AuditorPort, Fleet
from orchestrator.deadlines import within
from orchestrator.dispatch.book import Book
from orchestrator.loop.gap_drift import GapDrift
from orchestrator.replicas.replicas import Replica, Replicas
from orchestrator.run_dir.layout import write_atomic
from rollout.errors import ConcordError, DeadlineError, ProcessLostError, UserError, boundary
from rollout.types.dispatch import Ending, RejectReason
from rollout.types.trajectory import GroupHeader
from rollout.types.weights import PolicyVersion
from trainer.config.consistency import ConsistencyConfig
from trainer.consistency.checks.gap import NOISE_FLOOR_NATS, GapBaseline
from trainer.consistency.service.report import AuditContext, AuditReport, GroupVerdict, ReplicaFacts, ReplicaGap
from trainer.types.evidence import ANNOTATION_KIND, Attribution, Check, CheckSeverity, GapCause
from trainer.types.step import OldLogprobSource, Verdict

EVIDENCE_KIND = "evidence"
"""Annotations of mode `audit`: kept for people, never seen by the trainer."""
MAX_GROUPS = 16
"""Groups of one call."""
MAX_WAITING = 64
"""Groups that mode `audit` keeps waiting; the oldest beyond it are let go, and counted."""
BASELINE_GROUPS = 4
"""Groups of a replica without a baseline that mode `audit` keeps waiting besides its share: a sample to start from, not
all that comes meanwhile."""
MAX_LOST = 3
"""Service actors in a row that may die or hang before the run ends with the reason."""


@dataclass(slots=True, kw_only=True)
class ConsistencySums:
    """What audits have found since the loop began, and the newest numbers of each replica."""

    audited: int = 0
    skipped: int = 0
    """Groups chosen for an audit that were let go because the service was behind."""
    restarts: int = 0
    degraded_steps: int = 0
    """Steps of mode `gate` that went on without recomputed log-probs."""
    verdicts: Counter[str] = field(default_factory=Counter[str])
    findings: Counter[str] = field(default_factory=Counter[str])
    """Findings by cause."""
    reasons: Counter[str] = field(default_factory=Counter[str])
    """Audited groups by the codes of what failed in them."""
    scored_tokens: int = 0
    busy_s: float = 0.0
    held_versions: int = 0
    held_bytes: int = 0
    gaps: dict[int, ReplicaGap] = field(default_factory=dict[int, ReplicaGap])


_BASELINES = TypeAdapter(list[GapBaseline], config=ConfigDict(extra="forbid"))


class Baselines:
    """Each replica's own gap when the run began, in `baseline.json`; a resume goes on with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with boundary(UserError, f"cannot read {path} (move it away: the replicas' gaps are measured anew)"):
            stored = _BASELINES.validate_json(path.read_bytes()) if path.exists() else []
            self._baselines = {baseline.replica: baseline for baseline in stored}

    def get(self, replica: int) -> GapBaseline | None:
        """None before it was measured."""
        return self._baselines.get(replica)

    def set(self, baseline: GapBaseline) -> None:
        """Keep the first measurement of a replica."""
        self._baselines[baseline.replica] = baseline
        write_atomic(self._path, json.dumps([asdict(each) for each in self._baselines.values()], indent=2) + "\n")


class Consistency:
    """Owns what waits for an audit and what its answers do."""

    def __init__(
        self,
        *,
        config: ConsistencyConfig,
        seed: int,
        fleet: Fleet,
        book: Book,
        replicas: Replicas,
        baselines: Baselines,
        ledger: Iterable[PolicyVersion],
        fail_replica: Callable[[Replica, str], Awaitable[None]],
    ) -> None:
        self._config, self._seed, self._fleet, self._book, self._replicas, self._baselines = (
            config,
            seed,
            fleet,
            book,
            replicas,
            baselines,
        )
        self._ledger, self._fail_replica = set(ledger), fail_replica
        self._waiting: OrderedDict[str, GroupHeader] = OrderedDict()
        self._since: dict[str, float] = {}
        self._bell = asyncio.Event()
        self._drift = GapDrift()
        self.sums = ConsistencySums()
        self.mode = config.mode
        self.gates = config.mode == "gate"
        self.take(book.pool.ready.values())

    def take(self, headers: Iterable[GroupHeader]) -> None:
        """Groups became ready: choose those to audit. In mode `audit`, a share by a hash of the dispatch, and some of a
        replica without a baseline."""
        for header in headers:
            if (
                self.gates
                or _share(self._seed, header.dispatch_id) < self._config.audit_fraction
                or self._wants_baseline(header.replica)
            ):
                self._waiting[header.dispatch_id] = header
                self._since.setdefault(header.dispatch_id, time.monotonic())
        while not self.gates and len(self._waiting) > MAX_WAITING:
            self._forget(self._waiting.popitem(last=False)[0])
            self.sums.skipped += 1
        self._bell.set()

    def _wants_baseline(self, replica: int) -> bool:
        if self._baselines.get(replica) is not None:
            return False
        return sum(header.replica == replica for header in self._waiting.values()) < BASELINE_GROUPS

    def baseline_multiple(self, gap: ReplicaGap) -> float | None:
        """A gap over the replica's own when the run began."""
        baseline = self._baselines.get(gap.replica)
        return None if baseline is None else gap.mean_abs / max(baseline.mean_abs, NOISE_FLOOR_NATS)

    def baseline_of(self, replica: int) -> GapBaseline | None:
        """The replica's own gap when the run began; None before it was measured."""
        return self._baselines.get(replica)

    @property
    def num_waiting(self) -> int:
        """Groups that wait for an audit."""
        return len(self._waiting)

    def committed(self, policy: PolicyVersion) -> None:
        """The ledger has a new version: groups that waited for it can be audited."""
        self._ledger.add(policy)
        self._bell.set()

    def source_of(self, batch: Sequence[GroupHeader]) -> OldLogprobSource:
        """Where the old log-probs of a step on `batch` come from: recomputed when all of it was scored."""
        audited = self._book.pool.audited
        return (
            OldLogprobSource.RECOMPUTED
            if self.gates and all(h.dispatch_id in audited for h in batch)
            else OldLogprobSource.ROLLOUT
        )

    async def step_taken(self, batch: Sequence[GroupHeader], source: OldLogprobSource, version: int) -> None:
        """A step begins on `batch`; one that `gate` lets go on without scores is an event."""
        if self.gates and source is OldLogprobSource.ROLLOUT:
            self.sums.degraded_steps += 1
            unscored = sum(h.dispatch_id not in self._book.pool.audited for h in batch)
            fields = {"step": version, "unscored_groups": unscored, "groups": len(batch), "old_logprobs": str(source)}
            await self._book.store.record_event("consistency_degraded", {**fields})

    async def canary_failed(self, replica: Replica, policy: PolicyVersion, reason: str) -> None:
        """A replica failed to take over `policy`. Where it answered the canary otherwise, its own gap at the start
        excluded, all of that is weight_sync."""
        if replica.canary_gap_nats <= replica.tolerance_nats:
            return
        baseline, gap = self._baselines.get(replica.slot), replica.canary_gap_nats
        own = 0.0 if baseline is None else baseline.mean_abs
        await self._record(
            replica=replica.slot,
            policy=policy.key,
            cause=GapCause.WEIGHT_SYNC,
            gap_nats=gap if math.isfinite(gap) else None,
            explained=1.0 - own / gap if gap > own else 0.0,
            codes="canary",
            detail=reason,
        )

    async def run(self, index: int) -> None:
        """Audit for ever with service actor `index`, replacing it when it dies; ends by cancellation.

        Raises:
            ConcordError: it died too often in a row.
        """
        lost = 0
        while True:
            port = await self._fleet.new_auditor(index)
            try:
                while True:
                    await self._audit_next(port)
                    lost = 0
            except (ProcessLostError, DeadlineError) as error:
                lost += 1
                await port.kill()
                if lost >= MAX_LOST:
                    told = f"consistency service {index} was lost {lost} times in a row: {error}"
                    raise ConcordError(f"{told}; set consistency.mode to 'off' to go on without") from error
                self.sums.restarts += 1
                await self._book.store.record_event("auditor_lost", {"auditor": index, "detail": str(error)})

    async def waive(self) -> None:
        """`gate` with `when_behind = "audit"`: let groups go on unscored after `behind_s`; ends by cancellation."""
        limit, pool = self._config.behind_s, self._book.pool
        while True:
            now = time.monotonic()
            late = {i for i, since in self._since.items() if now - since > limit and i in pool.ready}
            if not late <= pool.waived:
                pool.waived |= late
                self._book.ring()
            await asyncio.sleep(min(1.0, limit / 4))

    async def _audit_next(self, port: AuditorPort) -> None:
        batch = self._next_batch()
        if not batch:
            self._bell.clear()
            await self._bell.wait()
            return
        ids = [header.dispatch_id for header in batch]
        kind = ANNOTATION_KIND if self.gates else EVIDENCE_KIND
        try:
            asked = port.audit(ids, self._context(batch), kind)
            report = await within(
                asked, self._config.deadline_s, f"the consistency service to score {len(batch)} groups"
            )
        except ConcordError:
            self._waiting = OrderedDict({**{header.dispatch_id: header for header in batch}, **self._waiting})
            raise
        for header in batch:
            self._forget(header.dispatch_id)
        await self._apply(report)

    def _forget(self, dispatch_id: str) -> None:
        self._waiting.pop(dispatch_id, None)
        self._since.pop(dispatch_id, None)

    def _next_batch(self) -> list[GroupHeader]:
        """The oldest groups that wait; in `gate` only those that may still be trained on."""
        newest, pool = max(self._ledger), self._book.pool
        for dispatch_id in [i for i in self._waiting if self.gates and i not in pool.ready]:
            self._forget(dispatch_id)
        chosen = [header for header in self._waiting.values() if header.newest <= newest][:MAX_GROUPS]
        for header in chosen:
            del self._waiting[header.dispatch_id]
        return chosen

    def _context(self, batch: Sequence[GroupHeader]) -> AuditContext:
        slots = sorted({header.replica for header in batch})
        return AuditContext(
            committed=frozenset(policy for header in batch for policy in header.policies if policy in self._ledger),
            replicas=tuple(
                ReplicaFacts(
                    replica=slot,
                    canary_gap=self._replicas[slot].canary_gap_nats,
                    canary_tolerance=self._replicas[slot].tolerance_nats,
                    baseline=self._baselines.get(slot),
                )
                for slot in slots
            ),
        )

    async def _apply(self, report: AuditReport) -> None:
        sums = self.sums
        sums.audited += len(report.groups)
        sums.scored_tokens += report.scored_tokens
        sums.busy_s += report.seconds
        sums.held_versions, sums.held_bytes = report.held_versions, report.held_bytes
        sums.reasons.update(reason for group in report.groups for reason in group.reasons)
        sums.verdicts.update(str(verdict) for group in report.groups for verdict in group.verdicts)
        for gap in report.gaps:
            await self._take_gap(gap)
        if self.gates:
            await self._let_through(report.groups)

    async def _record(self, *, cause: GapCause, **fields: str | int | float | None) -> None:
        self.sums.findings[str(cause)] += 1
        await self._book.store.record_event("consistency_finding", {"cause": str(cause), **fields})

    async def _let_through(self, groups: Sequence[GroupVerdict]) -> None:
        pool = self._book.pool
        refused = [g for g in groups if all(v in (Verdict.REJECT, Verdict.QUARANTINE) for v in g.verdicts)]
        pool.audited.update(g.dispatch_id for g in groups if g.complete and g.dispatch_id in pool.ready)
        pool.waived.update(g.dispatch_id for g in groups if not g.complete and g.dispatch_id in pool.ready)
        await self._book.end([_ending(group) for group in refused])
        self._book.ring()

    async def _note_lost_routing(self, gap: ReplicaGap) -> None:
        """An event when a replica's routing evidence begins to have holes; what is missing is never a cause of a
        gap."""
        before, now = self.sums.gaps.get(gap.replica), gap.routing
        whole_before = before is None or before.routing is None or before.routing.coverage == 1.0
        if now is not None and now.coverage < 1.0 and whole_before:
            codes = ",".join(finding.code for finding in gap.findings if finding.check is Check.ROUTING)
            fields = {
                "replica": gap.replica,
                "policy": gap.newest.key,
                "coverage": now.coverage,
                "hollow_cells": int(now.hollow_cells.sum()),
                "codes": codes,
            }
            await self._book.store.record_event("routing_incomplete", {**fields})

    async def _take_gap(self, gap: ReplicaGap) -> None:
        await self._note_lost_routing(gap)
        self.sums.gaps[gap.replica] = gap
        self._book.accounts.distributions.add("concord_audited_log_ratio_nats", gap.log_ratios, str(gap.replica))
        if self._baselines.get(gap.replica) is None and gap.num_tokens and math.isfinite(gap.k3):
            baseline = GapBaseline(
                engine=gap.engine,
                replica=gap.replica,
                mean_abs=gap.mean_abs,
                k3=gap.k3,
                f2=gap.outside_factor_two,
                tokens=gap.num_tokens,
            )
            with self._book.side_files.spared("baseline.json"):
                self._baselines.set(baseline)
            await self._book.side_files.tell()
            fields = {
                "replica": gap.replica,
                "mean_abs_nats": gap.mean_abs,
                "k3_nats": gap.k3,
                "tokens": gap.num_tokens,
            }
            fields |= {"policy": gap.newest.key, "trainer_rounding_nats": gap.trainer_rounding}
            await self._book.store.record_event("consistency_baseline", {**fields})
        drift = self._drift.take(gap, self._replicas[gap.replica].incarnation) if math.isfinite(gap.mean_abs) else None
        if drift is not None:
            await self._book.store.record_event(
                "consistency_drift", {"replica": gap.replica, "policy": gap.newest.key, "detail": drift.detail}
            )
        failed = [finding for finding in gap.findings if finding.severity is CheckSeverity.FAIL]
        if not failed and gap.attribution is None:
            return
        cause = gap.attribution.first if gap.attribution is not None else _CAUSES.get(failed[0].check, GapCause.UNKNOWN)
        await self._record(
            replica=gap.replica,
            policy=gap.newest.key,
            cause=cause,
            gap_nats=gap.mean_abs if gap.attribution is None else gap.attribution.gap,
            explained=0.0 if gap.attribution is None else gap.attribution.explained,
            codes=",".join(dict.fromkeys(finding.code for finding in gap.findings)),
            detail=failed[0].detail if failed else "",
            **({} if gap.attribution is None else _parts(gap.attribution)),
        )
        if cause is GapCause.WEIGHT_SYNC and failed:
            await self._fail_replica(
                self._replicas[gap.replica],
                f"its log-probs are {gap.mean_abs:.3g} nats a token away from the trainer's: weight_sync",
            )


_CAUSES = {
    Check.STRUCTURE: GapCause.TOKENIZER,
    Check.TOKENIZER: GapCause.TOKENIZER,
    Check.VERSION: GapCause.VERSION_TAG,
}
"""Of a check that failed without a gap to attribute."""


def _parts(attribution: Attribution) -> dict[str, float]:
    """What each cause explains and what is left, as fields that add up to the gap."""
    return {
        **{f"{cause}_nats": nats for cause, nats in attribution.parts},
        f"{GapCause.UNKNOWN}_nats": attribution.residual,
    }


def _ending(group: GroupVerdict) -> Ending:
    """Of a group of which no trajectory may be trained on; its prompt comes again."""
    quarantined = Verdict.QUARANTINE in group.verdicts
    reason = RejectReason.QUARANTINED if quarantined else RejectReason.INCONSISTENT
    return Ending(dispatch_id=group.dispatch_id, reason=reason, detail=", ".join(group.reasons), readmit=True)


def _share(seed: int, dispatch_id: str) -> float:
    """A number in [0, 1), the same for the same dispatch whatever happened before."""
    digest = hashlib.blake2b(f"{seed}/{dispatch_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
