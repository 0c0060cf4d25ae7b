"""Layer 4: the training system. What the consistency service found is taken over under its cause; the rest is read off
failures and events."""

from collections.abc import Callable

from orchestrator.doctor.findings import Evidence, Finding, Severity, counted
from orchestrator.doctor.rules_data import PAST_STEPS, failures
from orchestrator.doctor.trends import level, share, since
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record, RunEvent

WINDOW = 10
PERSISTENCE = 0.8
SLOW = 2.0
"""Time of the slowest replica's groups over the median of the others', above which it is slow."""
STALE_WINDOW = 20
STALE_SHARE = 0.2
"""Share of the dispatches of the window that were rejected as stale."""
LEAST_STALE = 3
_HARMFUL = (Cause.TOKENIZER, Cause.LOGPROB_SEMANTICS, Cause.WEIGHT_SYNC, Cause.VERSION_TAG)
"""Nothing downstream can repair these."""


def disagreement(cause: Cause, told_as: str) -> Callable[[Record], Finding | None]:
    """A rule: the consistency service named `told_as` as the cause of a gap."""

    def rule(record: Record) -> Finding | None:
        events = [event for event in record.of_kind("consistency_finding") if event.text("cause") == told_as]
        if not events:
            return None
        worst, replicas = max(events, key=_gap), ", ".join(sorted({event.text("replica") for event in events}))
        numbers = (
            ("findings", float(len(events))),
            ("largest gap in nats", worst.number("gap_nats")),
            ("explained", worst.number("explained")),
        )
        return Finding(
            cause=cause,
            severity=_present(record, events[-1], Severity.CRITICAL if cause in _HARMFUL else Severity.WARN),
            since=events[0].step,
            summary=(
                f"replica {replicas} differs from the trainer ({counted(len(events), 'finding')}): "
                f"{worst.text('detail') or worst.text('codes')}"
            ),
            evidence=(
                Evidence(
                    series="consistency_finding",
                    first_step=events[0].step,
                    last_step=events[-1].step,
                    numbers=numbers,
                    note=told_as,
                ),
            ),
        )

    return rule


def _gap(event: RunEvent) -> float:
    gap = event.number("gap_nats")
    return gap if gap == gap else float("-inf")


def _present(record: Record, newest: RunEvent, severity: Severity) -> Severity:
    return Severity.INFO if record.last_step - newest.step > PAST_STEPS else severity


def told(cause: Cause, kinds: tuple[str, ...], severity: Severity) -> Callable[[Record], Finding | None]:
    """A rule: events of these kinds happened."""

    def rule(record: Record) -> Finding | None:
        events = record.of_kind(*kinds)
        if not events:
            return None
        newest = events[-1]
        detail = newest.text("detail") or newest.text("reason") or newest.text("codes")
        return Finding(
            cause=cause,
            severity=_present(record, newest, severity),
            since=events[0].step,
            summary=(
                f"{counted(len(events), 'event')} {' or '.join(dict.fromkeys(event.kind for event in events))}, the "
                f"newest: {detail}"
            ),
            evidence=(
                Evidence(
                    series=newest.kind,
                    first_step=events[0].step,
                    last_step=newest.step,
                    numbers=(("events", float(len(events))),),
                    note=detail,
                ),
            ),
        )

    return rule


gap_drift = told(Cause.GAP_DRIFT, ("consistency_drift",), Severity.WARN)
routing_incomplete = told(Cause.ROUTING_INCOMPLETE, ("routing_incomplete",), Severity.WARN)
replica_failures = told(Cause.REPLICA_FAILURES, ("replica_failed", "replica_start_failed"), Severity.WARN)
worker_lost = told(Cause.WORKER_LOST, ("worker_lost", "auditor_lost"), Severity.WARN)
engine_failures = failures(Cause.ENGINE_FAILURES, ("engine",), Severity.WARN, least_share=0.02)
reward_worker = failures(Cause.REWARD_WORKER, ("reward_worker_died",), Severity.WARN, least_share=0.01)


def slow_replica(record: Record) -> Finding | None:
    """The slowest replica needs a multiple of the others' time."""
    ratio = record.column("replica_slowness")
    newest = ratio[-WINDOW:]
    if newest.size < WINDOW or share(newest >= SLOW) < PERSISTENCE:
        return None
    first, last = int(record.steps[-WINDOW]), record.last_step
    slot = level(record.column("slowest_replica")[-1:])
    return Finding(
        cause=Cause.SLOW_REPLICA,
        severity=Severity.WARN,
        since=since(record.steps, ratio >= SLOW),
        summary=f"replica {slot:.0f} takes {level(newest):.1f} times as long for a group as the others",
        evidence=(
            Evidence(
                series="replica_slowness",
                first_step=first,
                last_step=last,
                numbers=(("mean", level(newest)), ("limit", SLOW)),
            ),
        ),
    )


def stale_work(record: Record) -> Finding | None:
    """Many finished groups are too old when their turn comes."""
    window = min(STALE_WINDOW, record.steps.size - 1)
    if window < 1:
        return None
    stale, dispatched = record.tally("rejected:stale"), record.column("dispatched")
    lost, begun = float(stale[-1] - stale[-1 - window]), float(dispatched[-1] - dispatched[-1 - window])
    if lost < LEAST_STALE or not lost >= STALE_SHARE * begun:
        return None
    first, last = int(record.steps[-1 - window]), record.last_step
    return Finding(
        cause=Cause.STALE_WORK,
        severity=Severity.WARN,
        since=first,
        summary=f"{lost:.0f} of {begun:.0f} dispatches of the last {window} steps were rejected as stale",
        evidence=(
            Evidence(
                series="rejected:stale",
                first_step=first,
                last_step=last,
                numbers=(("rejected", lost), ("dispatched", begun)),
            ),
        ),
    )
