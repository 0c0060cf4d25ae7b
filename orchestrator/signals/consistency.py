"""Reduces what audits found to declared columns and to the summary. Of several replicas the worst is shown; per-replica
numbers are in the events."""

from collections.abc import Callable, Iterable, Mapping

from orchestrator.loop.auditing import AuditSums, Consistency
from trainer.consistency.service.report import ReplicaGap
from trainer.types.step import Verdict

UNKNOWN = -1.0
"""Before the first audit."""


def consistency_row(consistency: Consistency | None, wall_s: float) -> dict[str, float]:
    """The consistency columns of a metric row; without a service all is as before the first audit."""
    sums = AuditSums() if consistency is None else consistency.sums
    newest = {} if consistency is None else consistency.gaps.newest
    gaps = [gap for gap in newest.values() if gap.num_tokens]
    multiples = (
        [] if consistency is None else [m for gap in gaps if (m := consistency.gaps.baseline_multiple(gap)) is not None]
    )
    return {
        "consistency_gap_mean": _worst(gaps, lambda gap: gap.mean_abs),
        "consistency_gap_k3": _worst(gaps, lambda gap: gap.k3),
        "consistency_gap_ess": min((gap.ess for gap in gaps), default=UNKNOWN),
        "consistency_gap_tail": _worst(gaps, lambda gap: gap.outside_factor_two),
        "consistency_baseline_multiple": max(multiples, default=UNKNOWN),
        **routing_columns(newest),
        "consistency_audited_groups": sums.audited,
        "consistency_skipped_groups": 0 if consistency is None else consistency.queue.skipped,
        "consistency_masked": sums.verdicts[Verdict.MASK],
        "consistency_rejected": sums.verdicts[Verdict.REJECT],
        "consistency_quarantined": sums.verdicts[Verdict.QUARANTINE],
        "consistency_degraded_steps": sums.degraded_steps,
        "consistency_busy": sums.busy_s / max(1e-9, wall_s),
        "consistency_held_versions": sums.held_versions,
        "consistency_held_bytes": sums.held_bytes,
        "auditor_restarts": sums.restarts,
    }


def routing_columns(newest: Mapping[int, ReplicaGap]) -> dict[str, float]:
    """Of the newest audit: the largest mismatch among replicas that returned routing, the least coverage among those
    that should have."""
    routings = [gap.routing for gap in newest.values() if gap.routing is not None]
    compared = [routing for routing in routings if routing.num_rows]
    return {
        "consistency_routing_mismatch": max((routing.mismatch for routing in compared), default=UNKNOWN),
        "consistency_routing_any_mismatch": max((routing.token_any_mismatch for routing in compared), default=UNKNOWN),
        "consistency_routing_coverage": min((routing.coverage for routing in routings), default=UNKNOWN),
    }


def consistency_summary(consistency: Consistency | None) -> dict[str, object]:
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


def _worst(gaps: Iterable[ReplicaGap], value: Callable[[ReplicaGap], float]) -> float:
    return max((value(gap) for gap in gaps), default=UNKNOWN)
