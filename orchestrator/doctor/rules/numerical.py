"""Layer 3: numerical updates."""

from collections.abc import Sequence

import numpy as np

from orchestrator.doctor.findings import Evidence, Finding, Severity, counted
from orchestrator.doctor.trends import level
from orchestrator.doctor.windows import WINDOW, held, newest
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record, RunEvent, Values

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
REASON = "non-finite"
"""How the reason of such a skipped step begins; others were skipped on request."""
ALIKE = 0.5
"""Share of groups without a difference above which a small gradient is what the data give."""


def non_finite(record: Record) -> Finding | None:
    """A step that was skipped, or a value of an applied one that is no number."""
    begin = max(0, record.steps.size - RECENT)
    steps = record.steps[begin:]
    first = int(steps[0]) if steps.size else 0
    events = [
        event
        for event in record.of_kind("step_skipped")
        if event.step >= first and event.text("reason").startswith(REASON)
    ]
    broken = {
        name: flags
        for name in ("loss", "grad_norm")
        if name in record.columns and (flags := ~np.isfinite(record.column(name)[begin:])).any()
    }
    if not events and not broken:
        return None
    bad = steps[np.logical_or.reduce([np.zeros(steps.size, np.bool_), *broken.values()])]
    if events:
        reasons = "; ".join(sorted({event.text("reason") for event in events}))
        summary = f"{counted(len(events), 'step')} {'was' if len(events) == 1 else 'were'} skipped ({reasons})"
        if kept := _kept_batch(record, events):
            summary += f"; `concord replay RUN {kept}` runs the batch of the first that is kept"
        series = [("step_skipped", len(events))]
    else:
        summary = f"{' and '.join(broken)} not finite in {counted(bad.size, 'step')}"
        series = [(name, int(flags.sum())) for name, flags in broken.items()]
    return Finding(
        Cause.NON_FINITE,
        Severity.CRITICAL,
        min([*(event.step for event in events), *bad.tolist()[:1]]),
        summary,
        tuple(Evidence(name, first, record.last_step, (("steps", float(count)),)) for name, count in series),
    )


def _kept_batch(record: Record, skipped: Sequence[RunEvent]) -> str:
    """Folder of the oldest batch of these steps that no later one displaced; empty where none is kept."""
    gone = {
        name
        for event in record.of_kind("step_skipped", "gradloc")
        for name in event.text("removed").split(", ")
        if event.text("removed")
    }
    return next((event.text("saved") for event in skipped if event.text("saved") not in {"", *gone}), "")


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
        Cause.GRADIENT_SPIKE,
        Severity.WARN,
        int(record.steps[spikes[0][0]]),
        f"the gradient norm was {value:.3g} in step {step}, {times:.0f} times the median of the {HISTORY} steps before "
        f"({counted(len(spikes), 'such step')}){found}",
        (Evidence("grad_norm", step, step, (("norm", value), ("over the median", times), ("limit", SPIKE))),),
    )


def attention_logits(record: Record) -> Finding | None:
    """A logit above 100 among the newest steps."""
    logits = record.column("max_attention_logit")[-RECENT:]
    high = logits > MAX_LOGIT
    if not high.any():
        return None
    first, largest = int(record.steps[-RECENT:][high][0]), float(np.nanmax(logits))
    return Finding(
        Cause.ATTENTION_LOGITS,
        Severity.WARN,
        first,
        f"attention logits reach {largest:.0f}",
        (Evidence("max_attention_logit", first, record.last_step, (("largest", largest), ("limit", MAX_LOGIT))),),
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
        Cause.BLOCK_IMBALANCE,
        Severity.WARN,
        int(record.steps[min(local)]),
        f"block {block} had {times:.0f} times its ordinary gradient norm in step {step}, while "
        f"{len(norms) - len(found)} of {len(norms)} kept theirs",
        (Evidence("block_grad_norm", step, step, numbers, block),),
    )


def gradient_collapse(record: Record) -> Finding | None:
    """The norm falls to nearly nothing while groups still differ."""
    norms, alike = record.column("grad_norm"), record.column("zero_variance_groups")
    ordinary = norms[:HISTORY]
    if norms.size < HISTORY + WINDOW or not np.isfinite(ordinary).any():
        return None
    middle = float(np.nanmedian(ordinary))
    found, alike_now = held(record, norms, norms < COLLAPSE * middle), level(alike[-WINDOW:])
    if not middle > 0 or found is None or not alike_now < ALIKE:
        return None
    return Finding(
        Cause.GRADIENT_COLLAPSE,
        Severity.WARN,
        int(record.steps[-WINDOW]),
        f"the gradient norm is {found.level:.2g}, it was {middle:.2g}, and {1 - alike_now:.0%} of the groups still "
        "differ in reward",
        (newest(record, "grad_norm", ("now", found.level), ("at the start", middle)),),
    )


def frozen_block(record: Record) -> Finding | None:
    """Some blocks have no gradient in rows in which others have one."""
    norms = record.of_blocks("block_grad_norm")
    if len(norms) < 2 or len(record) < WINDOW:
        return None
    moving = np.nanmax(np.stack(list(norms.values())), axis=0, initial=0.0) > 0
    frozen = {
        block: found for block, values in norms.items() if (found := held(record, values, moving & (values == 0)))
    }
    if not frozen:
        return None
    begun = min(found.since for found in frozen.values())
    return Finding(
        Cause.FROZEN_BLOCK,
        Severity.WARN,
        begun,
        f"{', '.join(frozen)} had no gradient at all, while {len(norms) - len(frozen)} of {len(norms)} blocks had one",
        tuple(newest(record, "block_grad_norm", ("norm", 0.0)) for _ in frozen)[:1],
    )
