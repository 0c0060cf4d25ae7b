"""Layer 4, the run as a whole: what never happened, and how it ended. Read off its history and its events, not off its
steps: a run that cannot train has none."""

from orchestrator.doctor.findings import Evidence, Finding, Severity, counted
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.history import How
from orchestrator.run_dir.record import Record, RunEvent


def _version(record: Record) -> int:
    """The trainer's, as far as is known."""
    return max(record.last_step, record.history.version)


def _standing(record: Record) -> tuple[tuple[str, float], ...]:
    """How far the run has come, in numbers."""
    history = record.history
    return (
        ("version", float(_version(record))),
        ("dispatched", float(history.dispatched)),
        ("came back", float(history.came_back)),
        ("failed", float(sum(history.failed.values()))),
        ("seconds since the last step", history.since_step_s),
    )


def _ended(record: Record, cause: Cause, how: How, summary: str) -> Finding | None:
    """The run ended so."""
    end, version = record.history.end, _version(record)
    if end is None or end.how is not how:
        return None
    evidence = Evidence("run_ended", version, version, _standing(record), end.how)
    return Finding(cause, Severity.CRITICAL, version, f"{summary} at version {version}: {end.reason}", (evidence,))


def driver_lost(record: Record) -> Finding | None:
    """The driver is gone, and never said why."""
    return _ended(record, Cause.DRIVER_LOST, How.LOST, "the run's driver was killed, or its machine is gone,")


def run_failed(record: Record) -> Finding | None:
    """An error ended the run; where several starts came to nothing, the finding says how many."""
    starts, version = record.history.starts, _version(record)
    in_vain = 0
    for begun in reversed(starts):
        if begun != version:
            break
        in_vain += 1
    again = f" (the last {counted(in_vain, 'start')} made no step)" if in_vain > 1 else ""
    return _ended(record, Cause.RUN_FAILED, How.ERROR, f"an error ended the run{again}")


def no_step(record: Record) -> Finding | None:
    """No step: none yet, none for long, or the run has ended for it."""
    if (ended := _ended(record, Cause.NO_STEP, How.STALLED, "the run ended for want of a step")) is not None:
        return ended
    history, version = record.history, _version(record)
    if history.end is not None:
        return None
    if (quiet := _quiet(record, version)) is not None:
        numbers = (("silence in seconds", quiet.number("silence_s")), *_standing(record))
        return Finding(
            Cause.NO_STEP,
            Severity.WARN,
            version,
            f"no step for {quiet.number('silence_s'):.0f} s: {quiet.text('waits')}",
            (Evidence("no_step", version, version, numbers),),
        )
    if version or not history.dispatched:
        return None
    return Finding(
        Cause.NO_STEP,
        Severity.INFO,
        0,
        f"no step yet: of {history.dispatched} dispatches {history.came_back} came back and "
        f"{sum(history.failed.values())} failed in {history.since_step_s:.0f} s",
        (Evidence("dispatched", 0, 0, _standing(record)),),
    )


def _quiet(record: Record, version: int) -> RunEvent | None:
    """The newest word of a loop that is long without a step; None where a step came after it."""
    said = record.of_kind("no_step")
    return said[-1] if said and said[-1].step >= version else None
