"""Layer 1, what goes in: evaluations that changed, prompts that come twice, dispatches that fail."""

from collections.abc import Callable

import numpy as np

from orchestrator.doctor.evaluations import lines
from orchestrator.doctor.findings import Evidence, Finding, Severity
from orchestrator.doctor.windows import gained, newest
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record, RunEvent

PAST_STEPS = 200
"""Where the newest event lies further back than this many steps, the finding is only `info`."""
DUPLICATE_SHARE = 0.05
"""Share of repeated prompts in one pass that is worth a warning."""
FAILURE_WINDOW = 20
FAILURE_SHARE = 0.05
"""Share of the dispatches of the last FAILURE_WINDOW steps that failed for one reason."""
LEAST_FAILURES = 3


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
    """A rule: many of the newest dispatches failed for one of `reasons`."""

    def rule(record: Record) -> Finding | None:
        window = min(FAILURE_WINDOW, record.steps.size - 1)
        if window < 1:
            return None
        begun = gained(record.column("dispatched"), window)
        counts = {reason: record.tally(f"failed:{reason}") for reason in reasons}
        lost = {reason: gained(tally, window) for reason, tally in counts.items()}
        total = sum(lost.values())
        if total < LEAST_FAILURES or not total >= least_share * begun:
            return None
        worst = max(lost, key=lambda reason: lost[reason])
        rising = np.diff(sum(counts.values(), np.zeros(record.steps.size)), prepend=0.0) > 0
        return Finding(
            cause,
            severity,
            int(record.steps[int(np.argmax(rising))]),
            f"{total:.0f} of {begun:.0f} dispatches of the last {window} steps failed ({worst})",
            tuple(
                newest(record, f"failed:{reason}", ("failed", number), ("dispatched", begun), rows=window + 1)
                for reason, number in lost.items()
                if number
            ),
        )

    return rule


environment_failures = failures(Cause.ENVIRONMENT_FAILURES, ("environment", "prompt_too_long"), Severity.WARN)
reward_failures = failures(Cause.REWARD_FAILURES, ("reward_raised", "reward_invalid", "reward_timeout"), Severity.WARN)
