"""Layer 4: the training system. What the consistency service found is taken over under its cause; the rest is read off
failures and events."""

from collections.abc import Callable

from orchestrator.doctor.findings import Evidence, Finding, Severity, counted
from orchestrator.doctor.rules.inputs import PAST_STEPS, failures
from orchestrator.doctor.trends import level
from orchestrator.doctor.windows import gained, held, newest
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record, RunEvent

SLOW = 2.0
"""Time of the slowest replica's groups over the median of the others', above which it is slow."""
STALE_WINDOW = 20
STALE_SHARE = 0.2
"""Share of the dispatches of the window that were rejected as stale."""
LEAST_STALE = 3
_HARMFUL = (Cause.TOKENIZER, Cause.LOGPROB_SEMANTICS, Cause.WEIGHT_SYNC, Cause.VERSION_TAG)
"""Nothing downstream can repair these."""


def disagreement(cause: Cause, named: str) -> Callable[[Record], Finding | None]:
    """A rule: the consistency service named `named` as the cause of a gap."""

    def rule(record: Record) -> Finding | None:
        events = [event for event in record.of_kind("consistency_finding") if event.text("cause") == named]
        if not events:
            return None
        worst, replicas = max(events, key=_gap), ", ".join(sorted({event.text("replica") for event in events}))
        numbers = (
            ("findings", float(len(events))),
            ("largest gap in nats", worst.number("gap_nats")),
            ("explained", worst.number("explained")),
        )
        return Finding(
            cause,
            _present(record, events[-1], Severity.CRITICAL if cause in _HARMFUL else Severity.WARN),
            events[0].step,
            f"replica {replicas} differs from the trainer ({counted(len(events), 'finding')}): "
            f"{worst.text('detail') or worst.text('codes')}",
            (Evidence("consistency_finding", events[0].step, events[-1].step, numbers, named),),
        )

    return rule


def _gap(event: RunEvent) -> float:
    gap = event.number("gap_nats")
    return gap if gap == gap else float("-inf")


def _present(record: Record, newest: RunEvent, severity: Severity) -> Severity:
    return Severity.INFO if record.last_step - newest.step > PAST_STEPS else severity


def of_events(cause: Cause, kinds: tuple[str, ...], severity: Severity) -> Callable[[Record], Finding | None]:
    """A rule: events of these kinds happened."""

    def rule(record: Record) -> Finding | None:
        events = record.of_kind(*kinds)
        if not events:
            return None
        last = events[-1]
        detail = last.text("detail") or last.text("reason") or last.text("codes")
        kinds_seen = " or ".join(dict.fromkeys(event.kind for event in events))
        return Finding(
            cause,
            _present(record, last, severity),
            events[0].step,
            f"{counted(len(events), 'event')} {kinds_seen}, the newest: {detail}",
            (Evidence(last.kind, events[0].step, last.step, (("events", float(len(events))),), detail),),
        )

    return rule


gap_drift = of_events(Cause.GAP_DRIFT, ("consistency_drift",), Severity.WARN)
sampler = of_events(Cause.SAMPLER, ("sampler_differs",), Severity.CRITICAL)
repeated_samples = of_events(Cause.REPEATED_SAMPLES, ("samples_repeat",), Severity.CRITICAL)
trainer_disagrees = of_events(Cause.TRAINER_DISAGREES, ("trainer_disagrees",), Severity.CRITICAL)
update_differs = of_events(Cause.UPDATE_DIFFERS, ("update_differs",), Severity.CRITICAL)
routing_incomplete = of_events(Cause.ROUTING_INCOMPLETE, ("routing_incomplete",), Severity.WARN)
replica_failures = of_events(Cause.REPLICA_FAILURES, ("replica_failed", "replica_start_failed"), Severity.WARN)
_workers_died = of_events(Cause.WORKER_LOST, ("worker_lost", "auditor_lost"), Severity.WARN)
_workers_failed = failures(Cause.WORKER_LOST, ("worker",), Severity.WARN, least_share=0.02)
engine_failures = failures(Cause.ENGINE_FAILURES, ("engine",), Severity.WARN, least_share=0.02)
reward_worker = failures(Cause.REWARD_WORKER, ("reward_worker_died",), Severity.WARN, least_share=0.01)
episode_deadline = failures(Cause.EPISODE_DEADLINE, ("deadline",), Severity.WARN)


def worker_lost(record: Record) -> Finding | None:
    """Workers died, or their own work on dispatches failed."""
    return _workers_died(record) or _workers_failed(record)


def slow_replica(record: Record) -> Finding | None:
    """The slowest replica needs a multiple of the others' time."""
    ratio = record.column("replica_slowness")
    if (found := held(record, ratio, ratio >= SLOW)) is None:
        return None
    slot = level(record.column("slowest_replica")[-1:])
    return Finding(
        Cause.SLOW_REPLICA,
        Severity.WARN,
        found.since,
        f"replica {slot:.0f} takes {found.level:.1f} times as long for a group as the others",
        (newest(record, "replica_slowness", ("mean", found.level), ("limit", SLOW)),),
    )


def stale_work(record: Record) -> Finding | None:
    """Many finished groups are too old when their turn comes."""
    window = min(STALE_WINDOW, record.steps.size - 1)
    if window < 1:
        return None
    lost, begun = gained(record.tally("rejected:stale"), window), gained(record.column("dispatched"), window)
    if lost < LEAST_STALE or not lost >= STALE_SHARE * begun:
        return None
    evidence = newest(record, "rejected:stale", ("rejected", lost), ("dispatched", begun), rows=window + 1)
    return Finding(
        Cause.STALE_WORK,
        Severity.WARN,
        evidence.first_step,
        f"{lost:.0f} of {begun:.0f} dispatches of the last {window} steps were rejected as stale",
        (evidence,),
    )
