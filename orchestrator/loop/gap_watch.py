"""What a replica's gap means over time: its own gap when the run began, drift away from it, findings with their causes.

A gap that says that a replica computes with other weights ends that incarnation of it. It never asks the service.
"""

import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from orchestrator.dispatch.book import Book
from orchestrator.loop.audit_trends import GapDrift, SamplerFault, SamplerWatch
from orchestrator.observers import Observer, ReplicaFailure
from orchestrator.run_dir.layout import write_atomic
from orchestrator.weight_sync.lifecycle import ReplicaLifecycle
from rollout.errors import UserError, boundary
from trainer.consistency.checks.gap import NOISE_FLOOR_NATS, GapBaseline
from trainer.consistency.service.report import ReplicaGap
from trainer.types.evidence import Attribution, Check, CheckSeverity, GapCause

_CAUSES = {
    Check.STRUCTURE: GapCause.TOKENIZER,
    Check.TOKENIZER: GapCause.TOKENIZER,
    Check.VERSION: GapCause.VERSION_TAG,
}
"""The cause of a check that failed without a gap to attribute."""


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

    def has(self, replica: int) -> bool:
        """Whether it was measured."""
        return replica in self._baselines

    def set(self, baseline: GapBaseline) -> None:
        """Keep the first measurement of a replica."""
        self._baselines[baseline.replica] = baseline
        write_atomic(self._path, json.dumps([asdict(each) for each in self._baselines.values()], indent=2) + "\n")


class GapWatch(Observer):
    """The newest gap of each replica, and what became of it."""

    def __init__(self, book: Book, baselines: Baselines, lifecycle: ReplicaLifecycle, sampler: SamplerWatch) -> None:
        self._book, self._baselines, self._lifecycle, self.sampler = book, baselines, lifecycle, sampler
        self._drift = GapDrift()
        self.newest: dict[int, ReplicaGap] = {}
        self.findings: Counter[str] = Counter()
        """Findings by cause."""

    def baseline_of(self, replica: int) -> GapBaseline | None:
        """The replica's own gap when the run began; None before it was measured."""
        return self._baselines.get(replica)

    def baseline_multiple(self, gap: ReplicaGap) -> float | None:
        """A gap over the replica's own when the run began."""
        baseline = self._baselines.get(gap.replica)
        return None if baseline is None else gap.mean_abs / max(baseline.mean_abs, NOISE_FLOOR_NATS)

    async def replica_failed(self, failure: ReplicaFailure) -> None:
        """Where it answered the canary of a new policy otherwise than the trainer, all of that but its own gap at the
        start is weight_sync."""
        if failure.policy is None or failure.canary_gap_nats <= failure.tolerance_nats:
            return
        baseline, gap = self._baselines.get(failure.slot), failure.canary_gap_nats
        own = 0.0 if baseline is None else baseline.mean_abs
        await self._record(
            replica=failure.slot,
            policy=failure.policy.key,
            cause=GapCause.WEIGHT_SYNC,
            gap_nats=gap if math.isfinite(gap) else None,
            explained=1.0 - own / gap if gap > own else 0.0,
            codes="canary",
            detail=failure.reason,
        )

    async def take(self, gap: ReplicaGap, incarnation: int) -> None:
        """A new gap, of groups that this incarnation sampled."""
        await self._note_lost_routing(gap)
        self.newest[gap.replica] = gap
        self._book.accounts.distributions.add("concord_audited_log_ratio_nats", gap.log_ratios, str(gap.replica))
        await self._measure_baseline(gap)
        drift = self._drift.take(gap, incarnation) if math.isfinite(gap.mean_abs) else None
        if drift is not None:
            fields = {"replica": gap.replica, "policy": gap.newest.key, "detail": drift.detail}
            await self._book.store.record_event("consistency_drift", {**fields})
        await self._judge_sampler(gap, incarnation)
        await self._judge(gap, incarnation)

    async def _judge_sampler(self, gap: ReplicaGap, incarnation: int) -> None:
        for found in self.sampler.take(gap, incarnation):
            fields = {
                "replica": gap.replica,
                "policy": gap.newest.key,
                "tokens": found.sums.num_tokens,
                "z": found.sums.z,
                "inverse_temperature": found.sums.inverse_temperature,
                "repeats": found.sums.repeats,
                "expected_repeats": found.sums.expected_repeats,
                "detail": f"replica {gap.replica}: {found.detail}",
            }
            if found.fault is SamplerFault.REPEATED_SAMPLES:
                await self._book.store.record_event("samples_repeat", {**fields})
            else:
                await self._book.store.record_event("sampler_differs", {**fields})

    async def _judge(self, gap: ReplicaGap, incarnation: int) -> None:
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
            reading="" if gap.attribution is None else "; ".join(filter(None, gap.attribution.readings)),
            **({} if gap.attribution is None else _parts(gap.attribution)),
        )
        if cause is GapCause.WEIGHT_SYNC and failed:
            reason = f"its log-probs are {gap.mean_abs:.3g} nats a token away from the trainer's: weight_sync"
            await self._lifecycle.fail(gap.replica, incarnation, reason)

    async def _record(self, *, cause: GapCause, **fields: str | int | float | None) -> None:
        self.findings[str(cause)] += 1
        await self._book.store.record_event("consistency_finding", {"cause": str(cause), **fields})

    async def _measure_baseline(self, gap: ReplicaGap) -> None:
        """Keep the first gap of a replica that has tokens and a number."""
        if self._baselines.has(gap.replica) or not gap.num_tokens or not math.isfinite(gap.k3):
            return
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
        await self._book.side_files.report()
        fields = {
            "replica": gap.replica,
            "mean_abs_nats": gap.mean_abs,
            "k3_nats": gap.k3,
            "tokens": gap.num_tokens,
            "policy": gap.newest.key,
            "trainer_rounding_nats": gap.trainer_rounding,
        }
        await self._book.store.record_event("consistency_baseline", {**fields})

    async def _note_lost_routing(self, gap: ReplicaGap) -> None:
        """An event when a replica's routing evidence begins to have holes; what is missing is never a cause of a
        gap."""
        before, now = self.newest.get(gap.replica), gap.routing
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


def _parts(attribution: Attribution) -> dict[str, float]:
    """What each cause explains and what is left, as fields that add up to the gap."""
    return {
        **{f"{cause}_nats": nats for cause, nats in attribution.parts},
        f"{GapCause.UNKNOWN}_nats": attribution.residual,
    }
