"""Whether the policy is trained towards the reward, and whether it moves at all: what rows say where they cannot say
which of several faults it is."""

import numpy as np

from orchestrator.doctor.evaluations import score_change
from orchestrator.doctor.findings import Finding, Severity
from orchestrator.doctor.rules.policy import policy_collapse
from orchestrator.doctor.trends import Change, change, level, rolling
from orchestrator.doctor.windows import WINDOW, moved, newest
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record

FALL_ERRORS = 5.0
"""Standard errors by which the reward must lie below the best it was: the best of many windows is high by chance."""
FALL = 0.5
"""Fall of the reward that counts, in standard deviations of a reward."""
SCORE_ERRORS = 2.0
"""Standard errors by which an evaluation must have moved to have moved at all."""
ENTROPY_RISE = 1.5
"""Entropy over what it was, above which it has risen."""
LEAST_ENTROPY_RISE = 0.1
"""Nats by which it must have risen."""
ERRORS = 4.0
"""Standard errors by which a mean must have moved."""
LEARNING_ROWS = 40
"""Rows before it is said that nothing is learned."""
STILL_ROWS = 30
"""Rows before it is said that the policy does not move."""
RISE_ERRORS = 2.0
"""Standard errors by which reward or evaluation must have risen for anything to have been learned."""
GAIN = 0.25
"""Rise of the reward, in standard deviations of a reward, that would have been seen: where errors are larger, nothing
is said."""
LEAST_DIFFERENT = 0.5
"""Share of groups without a difference in reward, above which there is little to learn from."""
SOLVED = 0.9
"""Reward above which there is little left to learn."""
WARMING = 1.02
"""Learning rate over that of ten steps before, above which it still warms up."""
MOVED = 1.0
"""How far the reward could have come, in its own units: the sum over steps of its standard deviation times the root of
twice the KL of a sequence, which no step's gain exceeds; below it, the policy hardly moved."""
STILL_NATS = 1e-4
"""Mean change of a token's log-prob since it was sampled, at least a step ago, below which nothing moves."""
NO_RATE = 1e-9
"""Learning rate below which a thousand steps change no float32 weight of ordinary size."""


def reward_falls(record: Record) -> Finding | None:
    """The newest rewards lie far below the best that they were, and no collapse that the policy's own movement shows
    explains it."""
    best = _best(record)
    if best is None:
        return None
    fall, since = best
    spread = level(record.column("reward_std"))
    if not (fall.falls(FALL_ERRORS) and -fall.size >= FALL * spread > 0):
        return None
    collapse = policy_collapse(record)
    if collapse is not None and collapse.severity is not Severity.INFO:
        return None
    score = score_change(record, since, record.last_step)
    severity, told = Severity.WARN, "and no evaluation says whether prompts grew harder"
    if score is not None:
        severity, told = Severity.WARN, "while the evaluation stands still"
        if score.falls(SCORE_ERRORS):
            severity, told = Severity.CRITICAL, f"and the evaluation from {score.before:.2f} to {score.after:.2f}"
        elif score.rises(SCORE_ERRORS):
            severity, told = Severity.INFO, "while the evaluation rises: prompts grow harder"
    evidence = [moved(record, "reward_mean", fall)]
    if score is not None:
        evidence.append(moved(record, "eval_score", score))
    return Finding(
        Cause.REWARD_FALLS,
        severity,
        since,
        f"the reward fell from {fall.before:.2f} to {fall.after:.2f} {told}",
        tuple(evidence),
    )


def _best(record: Record) -> tuple[Change, int] | None:
    """From the best `WINDOW` rows to the newest, and the step at which it began to fall; None with too few rows."""
    rewards = record.column("reward_mean")
    if rewards.size < 2 * WINDOW or not np.isfinite(rewards).all():
        return None
    means = rolling(rewards, WINDOW)
    at = int(np.argmax(means[: means.size - WINDOW]))
    first, last = rewards[at : at + WINDOW], rewards[-WINDOW:]
    # By differences from row to row: a fall within the window is no noise.
    error = float(np.sqrt((np.square(np.diff(first)).mean() + np.square(np.diff(last)).mean()) / 2.0 / WINDOW))
    below = np.flatnonzero(means[at:] < means[at] - ERRORS * error / np.sqrt(2.0))
    begun = at + int(below[0]) if below.size else rewards.size - WINDOW
    return Change(before=float(first.mean()), after=float(last.mean()), error=error), int(record.steps[begun])


def entropy_rises(record: Record) -> Finding | None:
    """Entropy goes up, and the reward does not with it."""
    entropy, reward = change(record.column("policy_entropy"), WINDOW), change(record.column("reward_mean"), WINDOW)
    if entropy is None or reward is None or not entropy.rises(ERRORS):
        return None
    if entropy.ratio < ENTROPY_RISE or entropy.size < LEAST_ENTROPY_RISE:
        return None
    values = record.column("policy_entropy")
    above = np.flatnonzero(rolling(values, WINDOW) > (entropy.before + entropy.after) / 2)
    return Finding(
        Cause.ENTROPY_RISES,
        Severity.INFO if reward.rises(ERRORS) else Severity.WARN,
        int(record.steps[above[0]]) if above.size else int(record.steps[-WINDOW]),
        f"entropy rose from {entropy.before:.2f} to {entropy.after:.2f} nats while the reward went from "
        f"{reward.before:.2f} to {reward.after:.2f}",
        (moved(record, "policy_entropy", entropy), moved(record, "reward_mean", reward)),
    )


def _not_learned(record: Record, rows: int) -> Change | None:
    """The change of the reward from the first third of the run to the last, where it did not rise although groups
    differed; None where it rose, or too little is known to say so: it was high already, had nothing to rise from, the
    learning rate still warms up, or the run is shorter than `rows`."""
    rewards, rates = record.column("reward_mean"), record.column("learning_rate")
    third = max(WINDOW, rewards.size // 3)
    if len(record) < max(rows, 2 * third) or level(record.column("zero_variance_groups")) > LEAST_DIFFERENT:
        return None
    if level(rates[-WINDOW:]) > WARMING * level(rates[-2 * WINDOW : -WINDOW]):
        return None
    ends, whole = change(rewards, WINDOW), change(rewards, third)
    spread = level(record.column("reward_std"))
    if ends is None or whole is None or not spread > 0 or whole.after > SOLVED:
        return None
    if any(one.rises(RISE_ERRORS) for one in (ends, whole)) or whole.size + RISE_ERRORS * whole.error > GAIN * spread:
        return None
    score = score_change(record, int(record.steps[0]), record.last_step)
    return None if score is not None and score.rises(RISE_ERRORS) else whole


def nothing_learned(record: Record) -> Finding | None:
    """Groups differ in reward, and the reward has not risen; `info` in a run whose beginning is not seen, which may
    have learned before."""
    reward = _not_learned(record, LEARNING_ROWS)
    if reward is None or policy_still(record) is not None or reward_falls(record) is not None:
        return None
    collapse = policy_collapse(record)
    if collapse is not None and collapse.severity is not Severity.INFO:
        return None
    kl, length = record.column("approx_kl"), record.column("length_mean")
    reach = float(np.nansum(record.column("reward_std") * np.sqrt(2.0 * np.maximum(kl, 0.0) * length)))
    moves = f"moved (so far that {reach:.1f} could have been gained)" if reach >= MOVED else "hardly moved"
    return Finding(
        Cause.NOTHING_LEARNED,
        Severity.WARN if record.steps[0] <= WINDOW else Severity.INFO,
        int(record.steps[0]),
        f"the reward went from {reward.before:.3f} to {reward.after:.3f} (standard error {reward.error:.3f}) in "
        f"{len(record)} steps in which the policy {moves} and most groups differed in reward",
        (
            moved(record, "reward_mean", reward, ("standard error", reward.error)),
            newest(record, "approx_kl", ("mean", level(kl)), rows=len(record)),
            newest(record, "zero_variance_groups", ("mean", level(record.column("zero_variance_groups"))), rows=WINDOW),
        ),
    )


def policy_still(record: Record) -> Finding | None:
    """Tokens that are a step old have the log-probs that they were sampled with, or the learning rate is next to
    nothing; and the reward does not rise."""
    reward = _not_learned(record, STILL_ROWS)
    if reward is None:
        return None
    differences, ages = record.column("abs_logprob_difference_mean"), record.column("token_staleness_mean")
    old = differences[-WINDOW:][ages[-WINDOW:] > 0]
    rate = level(record.column("learning_rate")[-WINDOW:])
    unmoved = bool(old.size) and float(np.nanmax(old)) < STILL_NATS
    if not (unmoved or rate < NO_RATE):
        return None
    return Finding(
        Cause.POLICY_STILL,
        Severity.WARN,
        int(record.steps[0]),
        f"log-probs moved by {level(old):.1g} nats since their tokens were sampled, at a learning rate of {rate:.1g} "
        f"and a gradient norm of {level(record.column('grad_norm')[-WINDOW:]):.2g}; the reward stands at "
        f"{reward.after:.2f}",
        (
            newest(record, "abs_logprob_difference_mean", ("mean", level(old)), ("limit", STILL_NATS)),
            newest(record, "learning_rate", ("mean", rate)),
            moved(record, "reward_mean", reward),
        ),
    )
