"""Layer 1, what goes in: evaluations that changed, prompts that come twice, dispatches that fail."""

from collections.abc import Callable

import numpy as np

from orchestrator.doctor.evaluations import lines
from orchestrator.doctor.findings import Evidence, Finding, Severity, counted
from orchestrator.doctor.trends import level
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.history import FailureKind, How
from orchestrator.run_dir.record import Record, RunEvent

PAST_STEPS = 200
"""Where the newest event lies further back than this many steps, the finding is only `info`."""
DUPLICATE_SHARE = 0.05
"""Share of repeated prompts in one pass that is worth a warning."""
FAILURE_WINDOW = 20
FAILURE_SHARE = 0.05
"""Share of the dispatches of the last FAILURE_WINDOW steps that failed for one reason."""
LEAST_FAILURES = 3
HOPELESS_SHARE = 0.9
"""The same, above which nothing can be trained."""


def evaluation_changed(record: Record) -> Finding | None:
    """Two lines of scores instead of one."""
    every = lines(record)
    if len(every) < 2:
        return None
    before, after = every[-2].points[-1], every[-1].points[0]
    parts = sorted(
        name
        for name in {*before.fields, *after.fields}
        if name.startswith("part_") and before.fields.get(name) != after.fields.get(name)
    )
    named = ", ".join(part.removeprefix("part_") for part in parts) or "unknown parts"
    numbers = (("score before", before.number("score")), ("score after", after.number("score")))
    first, last = int(before.number("version")), int(after.number("version"))
    return Finding(
        Cause.EVALUATION_CHANGED,
        Severity.INFO if record.last_step - last > PAST_STEPS else Severity.WARN,
        last,
        f"the configuration of the evaluation changed between versions {first} and {last}: {named}",
        (Evidence("evaluation", first, last, numbers, f"differs in {named}"),),
    )


def _checked(record: Record, what: str) -> tuple[RunEvent, float] | None:
    """The newest check of prompts, and how many of them are `what`; None where none is."""
    checks = record.of_kind("prompts_checked")
    found = checks[-1].number(what) if checks else 0.0
    return (checks[-1], found) if found > 0 else None


def train_eval_overlap(record: Record) -> Finding | None:
    """Evaluation prompts that are also trained on."""
    if (checked := _checked(record, "overlapping")) is None:
        return None
    (event, found), of = checked, checked[0].number("evaluation_prompts")
    numbers = (
        ("overlapping", found),
        ("evaluation prompts", of),
        ("exact", event.number("exact")),
        ("by 13-grams", event.number("by_ngrams")),
    )
    return Finding(
        Cause.TRAIN_EVAL_OVERLAP,
        Severity.WARN,
        event.step,
        f"{found:.0f} of {of:.0f} evaluation prompts are also trained on (for example {event.text('example')})",
        (Evidence("prompts_checked", event.step, event.step, numbers),),
    )


def duplicate_prompts(record: Record) -> Finding | None:
    """Prompts that come more than once in a pass."""
    if (checked := _checked(record, "duplicates")) is None:
        return None
    (event, found), of = checked, checked[0].number("train_prompts")
    return Finding(
        Cause.DUPLICATE_PROMPTS,
        Severity.WARN if found > DUPLICATE_SHARE * of else Severity.INFO,
        event.step,
        f"{found:.0f} of {of:.0f} training prompts repeat another one",
        (Evidence("prompts_checked", event.step, event.step, (("duplicates", found), ("prompts", of))),),
    )


def failures(
    cause: Cause, reasons: tuple[str, ...], severity: Severity, least_share: float = FAILURE_SHARE
) -> Callable[[Record], Finding | None]:
    """A rule: many of the newest dispatches failed for one of `reasons`, those that ended after the newest step
    included. Where nearly all fail the finding is critical: nothing can be trained."""

    def rule(record: Record) -> Finding | None:
        window = min(FAILURE_WINDOW, record.steps.size - 1)
        lost, over = {reason: _lost(record, reason, window) for reason in reasons}, _over(record, window)
        total = sum(lost.values())
        if total < LEAST_FAILURES or not total >= least_share * over:
            return None
        first, last = _first_failure(record, reasons), max(record.last_step, record.history.version)
        begun = int(record.steps[-1 - window]) if window > 0 else 0
        most = record.history.most_frequent(reasons, since=begun)
        when = f"since step {begun}" if window > 0 else "so far"
        example = "" if most is None else f"; most often ({counted(most.count, 'time')}) {most}"
        ended = record.history.end is not None and record.history.end.how is How.FAILURES
        hopeless = ended or total >= HOPELESS_SHARE * over
        return Finding(
            cause,
            Severity.CRITICAL if hopeless else severity,
            first,
            f"{total:.0f} of {over:.0f} dispatches that ended {when} failed ({max(lost, key=lambda r: lost[r])})"
            f"{', and that ended the run' if ended else ''}{example}",
            tuple(
                Evidence(f"failed:{reason}", begun, last, (("failed", number), ("ended", over)), _place(most, reason))
                for reason, number in lost.items()
                if number
            ),
        )

    return rule


def _lost(record: Record, reason: str, window: int) -> float:
    """Dispatches that failed for `reason` in the last `window` steps and after them."""
    tally, history = record.tally(f"failed:{reason}"), record.history
    newest = float(history.failed.get(reason, 0)) if history.dispatched else level(tally[-1:])
    return (newest if newest == newest else 0.0) - (float(tally[-1 - window]) if window > 0 else 0.0)


def _over(record: Record, window: int) -> float:
    """Dispatches whose episodes ended in the last `window` steps and after them, with a group or without."""
    over = record.column("dispatched") - np.nan_to_num(record.column("running"))
    newest = float(record.history.over) if record.history.dispatched else level(over[-1:])
    return newest - (float(over[-1 - window]) if window > 0 else 0.0)


def _first_failure(record: Record, reasons: tuple[str, ...]) -> int:
    """The step in which they began."""
    tallies = sum((record.tally(f"failed:{reason}") for reason in reasons), np.zeros(record.steps.size))
    rising = np.flatnonzero(np.diff(tallies, prepend=0.0) > 0)
    if rising.size:
        return int(record.steps[rising[0]])
    return min((k.first_step for k in record.history.kinds if k.reason in reasons), default=record.last_step)


def _place(most: FailureKind | None, reason: str) -> str:
    return most.place or most.detail if most is not None and most.reason == reason else ""


environment_failures = failures(Cause.ENVIRONMENT_FAILURES, ("environment", "prompt_too_long"), Severity.WARN)
reward_failures = failures(Cause.REWARD_FAILURES, ("reward_raised", "reward_invalid", "reward_timeout"), Severity.WARN)
