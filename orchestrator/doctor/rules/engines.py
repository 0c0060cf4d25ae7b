"""Layer 4, what engines hand over: samples that repeat each other, answers that are cut, log-probs that the trainer
does not find although it holds the very weights that sampled."""

import numpy as np

from orchestrator.doctor.findings import Evidence, Finding, Severity
from orchestrator.doctor.rules.inputs import PAST_STEPS
from orchestrator.doctor.trends import level
from orchestrator.doctor.windows import held, newest
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record

REPEATS = 0.2
"""By which the share of equal samples lies above what their probabilities say."""
CUT = 0.1
"""Share of answers that ended by length below the limit."""
FORMATS_GAP = 1e-3
"""Mean |difference| of a replica's log-probs when the run began, in nats a token, that float32 does not make."""
SAME_WEIGHTS_GAP = 0.1
"""Mean |difference| of log-probs, in nats a token, between a trainer and tokens sampled by its very weights: half
precision makes a hundredth, quantised engines a few."""


def repeated_samples(record: Record) -> Finding | None:
    """Samples of a group are alike far more often than by chance."""
    repeats, expected = record.column("sample_repeats"), record.column("sample_repeats_expected")
    if (found := held(record, repeats, repeats - expected >= REPEATS)) is None:
        return None
    chance = level(expected[-10:])
    return Finding(
        Cause.REPEATED_SAMPLES,
        Severity.WARN,
        found.since,
        f"{found.level:.0%} of the pairs of samples of a group are the same, token by token; their probabilities say "
        f"{chance:.0%}",
        (newest(record, "sample_repeats", ("mean", found.level), ("expected", chance), ("limit above it", REPEATS)),),
    )


def answers_cut(record: Record) -> Finding | None:
    """Answers end by length below their limit."""
    cut = record.column("length_cut_fraction")
    if (found := held(record, cut, cut >= CUT)) is None:
        return None
    length = level(record.column("length_mean")[-10:])
    return Finding(
        Cause.ANSWERS_CUT,
        Severity.WARN,
        found.since,
        f"{found.level:.0%} of the answers end by length below sampling.max_new_tokens (mean length {length:.3g})",
        (newest(record, "length_cut_fraction", ("mean", found.level), ("limit", CUT)),),
    )


def formats_apart(record: Record) -> Finding | None:
    """Replicas and trainer lay apart from the start, as other number formats make them: worth knowing, once."""
    apart = [one for one in record.of_kind("consistency_baseline") if one.number("mean_abs_nats") >= FORMATS_GAP]
    if not apart:
        return None
    worst = max(apart, key=lambda one: one.number("mean_abs_nats"))
    gap, own = worst.number("mean_abs_nats"), worst.number("trainer_rounding_nats")
    rounding = f", {own:.2g} of it the trainer's own rounding" if own == own else ""
    return Finding(
        Cause.PRECISION,
        Severity.INFO,
        worst.step,
        f"engine and trainer lie {gap:.2g} nats a token apart from the start{rounding}: other number formats",
        (
            Evidence(
                "consistency_baseline",
                worst.step,
                worst.step,
                (("mean gap in nats", gap), ("limit", FORMATS_GAP)),
                f"replica {worst.text('replica')}",
            ),
        ),
    )


def same_weights_gap(record: Record) -> Finding | None:
    """In steps that train only on tokens of the very weights that they start from, log-probs must be those that were
    sampled; the first step of a run is one."""
    gaps, fresh = record.column("abs_rollout_difference_mean"), record.column("token_staleness_max") == 0
    rows = np.flatnonzero(fresh & (gaps > SAME_WEIGHTS_GAP))
    if not rows.size or rows.size < 0.5 * np.count_nonzero(fresh):
        return None
    first, last, gap = int(record.steps[rows[0]]), int(record.steps[rows[-1]]), level(gaps[rows])
    return Finding(
        Cause.UNKNOWN_GAP,
        Severity.INFO if record.last_step - last > PAST_STEPS else Severity.WARN,
        first,
        f"trainer and engine differ by {gap:.3f} nats a token on tokens that the trainer's own weights sampled (step "
        f"{first})",
        (Evidence("abs_rollout_difference_mean", first, last, (("mean", gap), ("limit", SAME_WEIGHTS_GAP))),),
    )
