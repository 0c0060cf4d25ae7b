"""Layer 2: policy change. KL and entropy together; either alone is no finding."""

import numpy as np

from orchestrator.doctor.causes import Cause
from orchestrator.doctor.findings import Evidence, Finding, Severity
from orchestrator.doctor.record import Record
from orchestrator.doctor.trends import Change, change, level

WINDOW = 10
"""Rows of each end that is compared."""
KL_RISE = 2.0
"""KL over what it was, above which it has risen."""
LEAST_KL = 0.02
"""Nats below which KL is small whatever it was."""
PEAK_RISE = 10.0
LEAST_PEAK = 0.1
"""A single step whose KL is this many times what it was, and at least so many nats, counts as well: after a collapse there is nothing left to move."""
ENTROPY_FALL = 0.6
"""Entropy over what it was, below which it has fallen."""
ERRORS = 4.0
"""Standard errors by which both must have moved."""
REWARD_GAIN = 0.25
"""Rise of the reward, in standard deviations of a reward, that the movement buys: then it is learning."""


def policy_collapse(record: Record) -> Finding | None:
    """KL up and entropy down together, and the reward is not the better for it."""
    entropy, reward = change(record.column("policy_entropy"), WINDOW), change(record.column("reward_mean"), WINDOW)
    name, kl = _kl(record)
    if entropy is None or reward is None or kl is None:
        return None
    values = np.nan_to_num(record.column(name), nan=0.0)
    top = int(np.argmax(values))
    leapt = values[top] >= max(LEAST_PEAK, PEAK_RISE * float(np.median(values[:WINDOW])))
    moved = leapt or (kl.rises(ERRORS) and kl.after >= LEAST_KL and kl.after >= KL_RISE * kl.before)
    narrowed = entropy.falls(ERRORS) and entropy.after <= ENTROPY_FALL * entropy.before
    learned = reward.rises(ERRORS) and reward.size >= REWARD_GAIN * level(record.column("reward_std"))
    if not (moved and narrowed) or learned:
        return None
    first, last = int(record.steps[0]), record.last_step
    reached = float(values[top]) if leapt else kl.after
    return Finding(
        cause=Cause.POLICY_COLLAPSE,
        severity=Severity.CRITICAL,
        since=int(record.steps[top if leapt else -WINDOW]),
        summary=f"KL rose from {kl.before:.3f} to {reached:.3f} and entropy fell from {entropy.before:.3f} to {entropy.after:.3f} nats together, "
        f"while the reward went from {reward.before:.2f} to {reward.after:.2f}",
        evidence=(
            Evidence(series=name, first_step=first, last_step=last, numbers=(("from", kl.before), ("to", kl.after), ("largest", float(values[top])))),
            Evidence(series="policy_entropy", first_step=first, last_step=last, numbers=(("from", entropy.before), ("to", entropy.after))),
            Evidence(series="reward_mean", first_step=first, last_step=last, numbers=(("from", reward.before), ("to", reward.after))),
            Evidence(series="learning_rate", first_step=last, last_step=last, numbers=(("now", level(record.column("learning_rate")[-1:])),)),
        ),
    )


def _kl(record: Record) -> tuple[str, Change | None]:
    """To version 0 where the run has a reference, else of old against new log-probs."""
    reference = record.column("reference_kl")
    name = "reference_kl" if level(reference) > 0 else "approx_kl"
    return name, change(record.column(name), WINDOW)
