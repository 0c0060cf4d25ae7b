"""What is known of each engine replica, by slot: versions, canaries, and the numbers of its newest audit."""

from collections.abc import Callable, Iterable

from orchestrator.loop.auditing import Consistency
from orchestrator.metrics.distributions import LabelValues
from orchestrator.replicas.replicas import Replica, Replicas
from trainer.consistency.service.report import ReplicaGap
from trainer.types.evidence import GapCause


def replica_numbers(replicas: Replicas, consistency: Consistency | None) -> dict[str, dict[LabelValues, float]]:
    """Gauges and counters with the label `replica`."""
    known = [replica for replica in replicas if replica.tag is not None]
    return {
        "concord_replica_up": _each(replicas, lambda r: float(r.port is not None and r.applied is not None)),
        "concord_replica_version": {
            (str(r.slot),): float(r.applied.version) for r in replicas if r.applied is not None
        },
        "concord_replica_canary_gap_nats": _each(known, lambda r: r.canary_gap_nats),
        "concord_replica_canary_tolerance_nats": _each(known, lambda r: r.tolerance_nats),
        "concord_digest_mismatches_total": _each(replicas, lambda r: float(r.digest_mismatches)),
        "concord_generated_tokens_total": _each(
            replicas, lambda r: float(r.generated_tokens + r.load.generated_tokens)
        ),
        **({} if consistency is None else _audited(consistency)),
    }


def _each(replicas: Iterable[Replica], value: Callable[[Replica], float]) -> dict[LabelValues, float]:
    return {(str(replica.slot),): value(replica) for replica in replicas}


def _audited(consistency: Consistency) -> dict[str, dict[LabelValues, float]]:
    gaps = [gap for gap in consistency.sums.gaps.values() if gap.num_tokens]
    routed = [(str(gap.replica), gap.routing) for gap in gaps if gap.routing is not None]
    baselines = [
        (str(gap.replica), baseline.mean_abs)
        for gap in gaps
        if (baseline := consistency.baseline_of(gap.replica)) is not None
    ]
    multiples = [
        (str(gap.replica), multiple) for gap in gaps if (multiple := consistency.baseline_multiple(gap)) is not None
    ]
    return {
        "concord_replica_gap_nats": {
            (str(gap.replica), name): value for gap in gaps for name, value in _statistics(gap)
        },
        "concord_replica_gap_limit_nats": {(str(gap.replica),): gap.mean_abs_limit for gap in gaps},
        "concord_replica_gap_k3_nats": {(str(gap.replica),): gap.k3 for gap in gaps},
        "concord_replica_ess": {(str(gap.replica),): gap.ess for gap in gaps},
        "concord_replica_tail": {(str(gap.replica),): gap.outside_factor_two for gap in gaps},
        "concord_replica_baseline_nats": {(slot,): value for slot, value in baselines},
        "concord_replica_baseline_multiple": {(slot,): value for slot, value in multiples},
        "concord_replica_attributed_nats": {
            (str(gap.replica), cause): nats for gap in gaps for cause, nats in attributed(gap).items()
        },
        "concord_replica_routing_mismatch": {
            (slot, str(block)): mismatch
            for slot, routing in routed
            if routing.num_rows
            for block, mismatch in enumerate(routing.block_mismatch)
        },
        "concord_replica_routing_coverage": {(slot,): routing.coverage for slot, routing in routed},
    }


def _statistics(gap: ReplicaGap) -> tuple[tuple[str, float], ...]:
    p50, p90, p99 = gap.abs_quantiles
    return (("mean", gap.mean_abs), ("p50", p50), ("p90", p90), ("p99", p99), ("max", gap.max_abs))


def attributed(gap: ReplicaGap) -> dict[str, float]:
    """Nats by cause, all of them; what no cause explains is `unknown`."""
    nats = {str(cause): 0.0 for cause in GapCause}
    if gap.attribution is not None:
        for cause, part in gap.attribution.parts:
            nats[cause] += part
        nats[GapCause.UNKNOWN] += gap.attribution.residual
    return nats
