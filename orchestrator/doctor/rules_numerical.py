"""Layer 3: numerical updates."""

import numpy as np

from orchestrator.doctor.findings import Evidence, Finding, Severity, counted
from orchestrator.doctor.trends import level, share
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record, Values

RECENT = 50
"""Rows in which a single event still counts."""
HISTORY = 20
"""Rows before a spike that say what is ordinary; with fewer, nothing is called a spike."""
SPIKE = 10.0
"""Over the median of its history."""
OVER_LARGEST = 3.0
"""Over the largest norm of its history, and over nine tenths of all norms, as well: where most groups are solved, norms
are small and one is not."""
MAX_LOGIT = 100.0
COLLAPSE = 0.01
"""Gradient norm over its median at the start, below which it has collapsed."""
WINDOW = 10
PERSISTENCE = 0.8
REASON = "non-finite"
"""How the reason of such a skipped step begins; others were skipped on request."""
ALIKE = 0.5
"""Share of groups without a difference above which a small gradient is what the data give."""


def non_finite(record: Record) -> Finding | None:
    """A step that was skipped, or a value of an applied one that is no number."""
    begin = max(0, record.steps.size - RECENT)
    first = int(record.steps[begin]) if record.steps.size else 0
    events = [
        event
        for event in record.of_kind("step_skipped")
        if event.step >= first and event.text("reason").startswith(REASON)
    ]
    broken = [
        name
        for name in ("loss", "grad_norm")
        if name in record.columns and not np.isfinite(record.column(name)[begin:]).all()
    ]
    if not events and not broken:
        return None
    bad = np.zeros(record.steps.size - begin, dtype=np.bool_)
    for name in broken:
        bad |= ~np.isfinite(record.column(name)[begin:])
    starts = [*(event.step for event in events), *(record.steps[begin:][bad].tolist()[:1])]
    reasons = {event.text("reason") for event in events}
    skipped = (
        f"{counted(len(events), 'step')} {'was' if len(events) == 1 else 'were'} skipped ({'; '.join(sorted(reasons))})"
    )
    told = skipped if events else f"{' and '.join(broken)} not finite in {counted(int(bad.sum()), 'step')}"
    series = (
        [("step_skipped", float(len(events)))]
        if events
        else [(name, float((~np.isfinite(record.column(name)[begin:])).sum())) for name in broken]
    )
    return Finding(
        cause=Cause.NON_FINITE,
        severity=Severity.CRITICAL,
        since=min(starts),
        summary=told,
        evidence=tuple(
            Evidence(series=name, first_step=first, last_step=record.last_step, numbers=(("steps", count),))
            for name, count in series
        ),
    )


def _spikes(values: Values) -> list[tuple[int, float]]:
    """(row, value over its median) of spikes among the newest rows; earlier spikes are no part of what is ordinary."""
    begin = max(0, values.size - RECENT - 2 * HISTORY)
    looked = values[begin:]
    positive_now = looked[np.isfinite(looked) & (looked > 0)]
    usual = OVER_LARGEST * float(np.percentile(values[np.isfinite(values)], 90)) if positive_now.size else 0.0
    if not positive_now.size or positive_now.max() <= max(SPIKE * positive_now.min(), usual):
        return []  # the quick answer of nearly every step
    found: list[tuple[int, float]] = []
    ordinary: list[float] = []
    for row, value in enumerate(looked.tolist(), start=begin):
        if not np.isfinite(value):
            continue
        history = ordinary[-HISTORY:]
        positive = [past for past in history if past > 0]
        if len(positive) >= HISTORY // 2 and len(ordinary) >= HISTORY:
            middle = float(np.median(positive))
            if value > SPIKE * middle and value > max(OVER_LARGEST * max(history), usual):
                if row >= values.size - RECENT:
                    found.append((row, value / middle))
                continue
        ordinary.append(value)
    return found


def gradient_spike(record: Record) -> Finding | None:
    """The global norm far above its own history."""
    spikes = _spikes(record.column("grad_norm"))
    if not spikes:
        return None
    row, times = max(spikes, key=lambda spike: spike[1])
    step, value = int(record.steps[row]), float(record.column("grad_norm")[row])
    searches = [
        event
        for event in record.of_kind("gradloc")
        if event.text("outcome") == "located" and event.number("step") == step
    ]
    found = (
        ""
        if not searches
        else f"; GradLoc found token {searches[-1].text('token_text')!r} of {searches[-1].text('trajectory_id')}"
    )
    return Finding(
        cause=Cause.GRADIENT_SPIKE,
        severity=Severity.WARN,
        since=int(record.steps[spikes[0][0]]),
        summary=(
            f"the gradient norm was {value:.3g} in step {step}, {times:.0f} times the median of the {HISTORY} steps "
            f"before ({counted(len(spikes), 'such step')}){found}"
        ),
        evidence=(
            Evidence(
                series="grad_norm",
                first_step=step,
                last_step=step,
                numbers=(("norm", value), ("over the median", times), ("limit", SPIKE)),
            ),
        ),
    )


def attention_logits(record: Record) -> Finding | None:
    """A logit above 100 among the newest steps."""
    logits = record.column("max_attention_logit")[-RECENT:]
    high = logits > MAX_LOGIT
    if not high.any():
        return None
    steps = record.steps[-RECENT:][high]
    largest = float(np.nanmax(logits))
    return Finding(
        cause=Cause.ATTENTION_LOGITS,
        severity=Severity.WARN,
        since=int(steps[0]),
        summary=f"attention logits reach {largest:.0f}",
        evidence=(
            Evidence(
                series="max_attention_logit",
                first_step=int(steps[0]),
                last_step=record.last_step,
                numbers=(("largest", largest), ("limit", MAX_LOGIT)),
            ),
        ),
    )


def block_imbalance(record: Record) -> Finding | None:
    """Some blocks spike, and most do not in the same step."""
    norms = record.of_blocks("block_grad_norm")
    at: dict[int, list[tuple[str, float]]] = {}
    for block, values in norms.items():
        for row, times in _spikes(values):
            at.setdefault(row, []).append((block, times))
    local = {row: found for row, found in at.items() if len(found) <= len(norms) / 2}
    if not local:
        return None
    row, found = max(local.items(), key=lambda item: max(times for _, times in item[1]))
    block, times = max(found, key=lambda one: one[1])
    step = int(record.steps[row])
    numbers = (
        ("over its median", times),
        ("limit", SPIKE),
        ("blocks that moved", float(len(found))),
        ("blocks", float(len(norms))),
    )
    return Finding(
        cause=Cause.BLOCK_IMBALANCE,
        severity=Severity.WARN,
        since=int(record.steps[min(local)]),
        summary=(
            f"block {block} had {times:.0f} times its ordinary gradient norm in step {step}, while "
            f"{len(norms) - len(found)} of {len(norms)} kept theirs"
        ),
        evidence=(Evidence(series="block_grad_norm", first_step=step, last_step=step, numbers=numbers, note=block),),
    )


def gradient_collapse(record: Record) -> Finding | None:
    """The norm falls to nearly nothing while groups still differ."""
    norms, alike = record.column("grad_norm"), record.column("zero_variance_groups")
    ordinary = norms[:HISTORY]
    if norms.size < HISTORY + WINDOW or not np.isfinite(ordinary).any():
        return None
    middle = float(np.nanmedian(ordinary))
    newest = norms[-WINDOW:]
    if not middle > 0 or share(newest < COLLAPSE * middle) < PERSISTENCE or not level(alike[-WINDOW:]) < ALIKE:
        return None
    first, last = int(record.steps[-WINDOW]), record.last_step
    return Finding(
        cause=Cause.GRADIENT_COLLAPSE,
        severity=Severity.WARN,
        since=first,
        summary=(
            f"the gradient norm is {level(newest):.2g}, it was {middle:.2g}, and {1 - level(alike[-WINDOW:]):.0%} of "
            "the groups still differ in reward"
        ),
        evidence=(
            Evidence(
                series="grad_norm",
                first_step=first,
                last_step=last,
                numbers=(("now", level(newest)), ("at the start", middle)),
            ),
        ),
    )
