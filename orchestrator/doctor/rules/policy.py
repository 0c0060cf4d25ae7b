"""Layer 2: policy change. KL alone, and entropy alone, is no finding."""

from collections.abc import Iterator

import numpy as np

from orchestrator.doctor.findings import Finding, Severity
from orchestrator.doctor.trends import Change, change, level
from orchestrator.doctor.windows import WINDOW, moved, newest
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record, Values

KL_RISE = 2.0
"""KL over what it was, above which it has risen."""
LEAST_KL = 0.02
"""Nats below which KL is small whatever it was."""
LEAP = 10.0
LEAST_LEAP = 0.1
"""A KL this many times its median before, and of so many nats, is a leap: one step may undo a policy, and nothing moves
afterwards."""
LEAST_BEFORE = 3
"""Rows before a leap."""
FIRST = 3
"""Rows that show what version 0 can do: later ones may be of a policy that is lost already."""
ENTROPY_FALL = 0.6
"""Entropy over what it was, below which it has fallen."""
ERRORS = 4.0
"""Standard errors by which both must have moved."""
REWARD_GAIN = 0.25
"""Rise of the reward, in standard deviations of a reward, that the movement buys: then it may be learning."""
REWARD_LOSS = 0.5
"""Fall of the reward, in the same, that counts beside a leap of KL whatever entropy does."""


def policy_collapse(record: Record) -> Finding | None:
    """KL up and entropy down together, slowly or in a leap, or a leap of KL with which the reward is lost. Slowly and
    with a better reward it is info."""
    return _leap(record) or _slide(record)


def lost(record: Record) -> bool:
    """Whether the policy was better at the start than it is now: what its groups look like now is then no property of
    the prompts."""
    collapse, rewards = policy_collapse(record), record.column("reward_mean")
    if collapse is not None and collapse.severity is Severity.CRITICAL:
        return True
    reward = change(rewards, WINDOW)
    fallen = level(rewards[:FIRST]) - level(rewards[-WINDOW:])
    spread = level(record.column("reward_std")[:FIRST])
    return (reward is not None and reward.falls(ERRORS)) or fallen >= REWARD_LOSS * spread > 0


def _slide(record: Record) -> Finding | None:
    name = _kl(record)
    kl, entropy, reward = (change(record.column(column), WINDOW) for column in (name, "policy_entropy", "reward_mean"))
    if kl is None or entropy is None or reward is None:
        return None
    risen = kl.rises(ERRORS) and kl.after >= max(LEAST_KL, KL_RISE * kl.before)
    narrowed = entropy.falls(ERRORS) and entropy.after <= ENTROPY_FALL * entropy.before
    learned = reward.rises(ERRORS) and reward.size >= REWARD_GAIN * level(record.column("reward_std"))
    if not (risen and narrowed):
        return None
    return _finding(
        record, name, int(record.steps[-WINDOW]), kl, entropy, reward, Severity.INFO if learned else Severity.CRITICAL
    )


def _leap(record: Record) -> Finding | None:
    """The first leap that did harm which still lasts."""
    name = _kl(record)
    for row in _leaps(record, record.column(name)):
        found = _harm(record, name, row)
        if found is not None:
            return found
    return None


def _harm(record: Record, name: str, row: int) -> Finding | None:
    """What lies in the rows after the leap in `row` is its doing, unless it has been made good since; what came later
    has another cause."""
    before, after = _sides(record, row)
    if after.start == after.stop:
        return None
    values, rewards = record.column(name), record.column("reward_mean")
    kl, entropy = (_medians(record.column(column), before, after) for column in (name, "policy_entropy"))
    spread = level(record.column("reward_std")[before])
    reward = Change(before=level(rewards[before]), after=level(rewards[after]), error=0.0)
    newest = Change(before=reward.before, after=level(rewards[max(row + 1, rewards.size - WINDOW) :]), error=0.0)
    narrowed = entropy.after <= ENTROPY_FALL * entropy.before and max(reward.size, newest.size) < REWARD_GAIN * spread
    if not (narrowed or min(-reward.size, -newest.size) >= REWARD_LOSS * spread > 0):
        return None
    reached = Change(before=kl.before, after=float(np.nanmax(values[row : after.stop])), error=0.0)
    return _finding(record, name, int(record.steps[row]), reached, entropy, reward, Severity.CRITICAL)


def _leaps(record: Record, values: Values) -> Iterator[int]:
    """Rows at which KL leaves its own history behind, oldest first. Among the first rows it has none yet: there every
    large KL is one."""
    for row in np.flatnonzero(values >= LEAST_LEAP).tolist():
        if 0 < row < WINDOW:
            yield row
            continue
        history = values[_sides(record, row)[0]]
        history = history[np.isfinite(history)]
        if history.size >= LEAST_BEFORE and values[row] >= LEAP * float(np.median(history)):
            yield row


def _sides(record: Record, row: int) -> tuple[slice, slice]:
    """Rows of the WINDOW steps before a row, and of those after it: where steps are missing, what lies beyond is no
    neighbour."""
    step = int(record.steps[row])
    first, last = np.searchsorted(record.steps, (step - WINDOW, step + WINDOW + 1)).tolist()
    return slice(first, row), slice(row + 1, last)


def _medians(values: Values, before: slice, after: slice) -> Change:
    return Change(before=float(np.nanmedian(values[before])), after=float(np.nanmedian(values[after])), error=0.0)


def _kl(record: Record) -> str:
    """KL to version 0 where the run has a reference, else of old against new log-probs."""
    return "reference_kl" if level(record.column("reference_kl")) > 0 else "approx_kl"


def _finding(
    record: Record, name: str, since: int, kl: Change, entropy: Change, reward: Change, severity: Severity
) -> Finding:
    changes = ((name, kl), ("policy_entropy", entropy), ("reward_mean", reward))
    rate = ("now", level(record.column("learning_rate")[-1:]))
    return Finding(
        Cause.POLICY_COLLAPSE,
        severity,
        since,
        f"KL rose from {kl.before:.3f} to {kl.after:.3f}, entropy went from {entropy.before:.3f} to "
        f"{entropy.after:.3f} nats, and the reward from {reward.before:.2f} to {reward.after:.2f}",
        (*(moved(record, *each) for each in changes), newest(record, "learning_rate", rate, rows=1)),
    )
