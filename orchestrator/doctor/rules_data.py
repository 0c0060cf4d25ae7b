"""Layer 1: data and reward. Each rule is a pure function of a record; windows are in rows, thresholds are named above
the rules that use them."""

from collections.abc import Callable

import numpy as np

from orchestrator.doctor.evaluations import Comparison, compared, lines
from orchestrator.doctor.findings import Evidence, Finding, Severity
from orchestrator.doctor.trends import change, level, share, since
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record

WINDOW = 10
"""Rows of a level."""
PERSISTENCE = 0.8
"""Share of the window's rows in which a condition must hold."""
PAST_STEPS = 200
"""Events whose newest lies further back are told as `info`."""
LEAST_EVALUATIONS = 4
"""Evaluations of one configuration before their trend is read."""
REWARD_ERRORS = 4.0
"""Standard errors by which the training reward must have risen."""
SCORE_ERRORS = 3.0
"""Standard errors by which evaluation and training reward must differ, or by which an evaluation must have fallen."""
LEAST_RISE = 0.25
"""Rise of the training reward that counts, in standard deviations of a reward."""
FOLLOWS = 0.3
"""An evaluation that rises by this share of the training reward's rise follows it."""
LEAST_FALL = 0.1
"""Fall of the evaluation that counts."""
LENGTH_GROWTH = 1.3
"""Growth of the mean length that counts beside a reward that the evaluation does not follow."""
TIED_ERRORS = 2.0
"""Standard errors by which length must have grown where the reward follows it anyway."""
LENGTH_CORRELATION = 0.6
"""Correlation of reward and length within groups above which the reward is a function of length."""
LEAST_CORRELATIONS = 5
"""Steps with a correlation at all: where every answer reaches the limit there is none."""
EASY_SHARE = 0.5
"""Share of groups without any difference, all of them right, above which prompts are easy."""
EASY_GAP = 0.15
"""By which the evaluation must lie below the training reward for that to be more than the end of learning."""
FEW_PROMPTS = 0.5
"""Share of different prompts among the newest groups, below which a rising reward may be memory."""
HARD_SHARE = 0.9
"""Share of groups without a right answer above which prompts are too hard."""
HARD_FROM_START = 0.5
"""The same at the start of the run: where groups were solved before, the policy was lost, not the prompts."""
FLAT_SHARE = 0.5
"""Share of groups without any difference, neither solved nor lost, above which the reward does not tell answers
apart."""
DUPLICATE_SHARE = 0.05
"""Share of repeated prompts in one pass that is worth a warning."""
FAILURE_WINDOW = 20
FAILURE_SHARE = 0.05
"""Share of the dispatches of the last FAILURE_WINDOW steps that failed for one reason."""
LEAST_FAILURES = 3
ENTROPY_FALL = 0.6
"""Entropy over what it was, below which it has fallen."""
SOLVED_SHARE = 0.3
"""Rise of the share of solved groups that explains a fall of entropy."""


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
        cause=Cause.EVALUATION_CHANGED,
        severity=Severity.INFO if record.last_step - last > PAST_STEPS else Severity.WARN,
        since=last,
        summary=f"the configuration of the evaluation changed between versions {first} and {last}: {named}",
        evidence=(
            Evidence(
                series="evaluation", first_step=first, last_step=last, numbers=numbers, note=f"differs in {named}"
            ),
        ),
    )


def train_eval_overlap(record: Record) -> Finding | None:
    """Evaluation prompts that are also trained on."""
    checks = record.of_kind("prompts_checked")
    event = checks[-1] if checks else None
    if event is None or not event.number("overlapping") > 0:
        return None
    found, of = event.number("overlapping"), event.number("evaluation_prompts")
    numbers = (
        ("overlapping", found),
        ("evaluation prompts", of),
        ("exact", event.number("exact")),
        ("by 13-grams", event.number("by_ngrams")),
    )
    return Finding(
        cause=Cause.TRAIN_EVAL_OVERLAP,
        severity=Severity.WARN,
        since=event.step,
        summary=f"{found:.0f} of {of:.0f} evaluation prompts are also trained on (for example {event.text('example')})",
        evidence=(Evidence(series="prompts_checked", first_step=event.step, last_step=event.step, numbers=numbers),),
    )


def duplicate_prompts(record: Record) -> Finding | None:
    """Prompts that come more than once in a pass."""
    checks = record.of_kind("prompts_checked")
    event = checks[-1] if checks else None
    if event is None or not event.number("duplicates") > 0:
        return None
    found, of = event.number("duplicates"), event.number("train_prompts")
    return Finding(
        cause=Cause.DUPLICATE_PROMPTS,
        severity=Severity.WARN if found > DUPLICATE_SHARE * of else Severity.INFO,
        since=event.step,
        summary=f"{found:.0f} of {of:.0f} training prompts repeat another one",
        evidence=(
            Evidence(
                series="prompts_checked",
                first_step=event.step,
                last_step=event.step,
                numbers=(("duplicates", found), ("prompts", of)),
            ),
        ),
    )


def failures(
    cause: Cause, reasons: tuple[str, ...], severity: Severity, least_share: float = FAILURE_SHARE
) -> Callable[[Record], Finding | None]:
    """A rule: many of the newest dispatches failed for one of `reasons`."""

    def rule(record: Record) -> Finding | None:
        window = min(FAILURE_WINDOW, record.steps.size - 1)
        if window < 1:
            return None
        dispatched = record.column("dispatched")
        begun = float(dispatched[-1] - dispatched[-1 - window])
        counts = {reason: record.tally(f"failed:{reason}") for reason in reasons}
        lost = {reason: float(tally[-1] - tally[-1 - window]) for reason, tally in counts.items()}
        total = sum(lost.values())
        if total < LEAST_FAILURES or not total >= least_share * begun:
            return None
        first, last = int(record.steps[-1 - window]), record.last_step
        worst = max(lost, key=lambda reason: lost[reason])
        rising = np.diff(sum(counts.values(), np.zeros(record.steps.size)), prepend=0.0) > 0
        return Finding(
            cause=cause,
            severity=severity,
            since=int(record.steps[int(np.argmax(rising))]),
            summary=f"{total:.0f} of {begun:.0f} dispatches of the last {window} steps failed ({worst})",
            evidence=tuple(
                Evidence(
                    series=f"failed:{reason}",
                    first_step=first,
                    last_step=last,
                    numbers=(("failed", number), ("dispatched", begun)),
                )
                for reason, number in lost.items()
                if number
            ),
        )

    return rule


environment_failures = failures(Cause.ENVIRONMENT_FAILURES, ("environment", "prompt_too_long"), Severity.WARN)
reward_failures = failures(Cause.REWARD_FAILURES, ("reward_raised", "reward_invalid", "reward_timeout"), Severity.WARN)


def _overstated(record: Record) -> Comparison | None:
    """The training reward rises, the evaluation does not follow, and what training believes lies above what the
    evaluation sees.

    Not so on a handful of prompts: those are learned by heart, which is no fault of the reward.
    """
    both = compared(record, LEAST_EVALUATIONS)
    if both is None or level(record.column("distinct_prompts")[-WINDOW:]) < FEW_PROMPTS:
        return None
    spread = level(record.column("reward_std"))
    rises = both.reward.rises(REWARD_ERRORS) and both.reward.size >= LEAST_RISE * spread
    apart = both.reward.size - both.score.size > SCORE_ERRORS * float(np.hypot(both.reward.error, both.score.error))
    follows = both.score.size > FOLLOWS * both.reward.size
    above = both.reward.after > both.last_score + SCORE_ERRORS * both.score.error
    return both if rises and apart and above and not follows else None


def _reward_and_score(both: Comparison) -> tuple[Evidence, ...]:
    first, last = both.first_step, both.last_step
    reward = (("from", both.reward.before), ("to", both.reward.after))
    score = (
        ("first", both.first_score),
        ("last", both.last_score),
        ("change of the fitted line", both.score.size),
        ("its standard error", both.score.error),
    )
    return (
        Evidence(series="reward_mean", first_step=first, last_step=last, numbers=reward),
        Evidence(series="eval_score", first_step=first, last_step=last, numbers=score),
    )


def length_reward(record: Record) -> Finding | None:
    """The reward is a function of length, or both grow while the evaluation does not follow."""
    both, length = _overstated(record), change(record.column("length_mean"), WINDOW)
    correlation = record.column("reward_length_correlation")
    rows = np.flatnonzero(np.isfinite(correlation) & (correlation != 0.0))[-WINDOW:]
    correlation = correlation[rows]
    tied = correlation.size >= LEAST_CORRELATIONS and share(correlation >= LENGTH_CORRELATION) >= PERSISTENCE
    grown = length is not None and length.ratio >= LENGTH_GROWTH and length.rises(REWARD_ERRORS)
    measured = correlation.size > 0
    if length is None or not (
        (both is not None and grown and (tied or not measured)) or (tied and length.rises(TIED_ERRORS))
    ):
        return None
    first, last = int(record.steps[0]), record.last_step
    evidence = [
        Evidence(
            series="length_mean",
            first_step=first,
            last_step=last,
            numbers=(("from", length.before), ("to", length.after)),
        )
    ]
    if measured:
        numbers = (("mean", level(correlation)), ("limit", LENGTH_CORRELATION))
        begin, end = int(record.steps[rows[0]]), int(record.steps[rows[-1]])
        evidence.append(Evidence(series="reward_length_correlation", first_step=begin, last_step=end, numbers=numbers))
    told = f"length grew from {length.before:.3g} to {length.after:.3g} tokens"
    if both is None:
        summary = f"{told}, and within groups the reward goes with it (correlation {level(correlation):.2f})"
    else:
        summary = (
            f"{told} while the reward rose from {both.reward.before:.2f} to {both.reward.after:.2f} and the evaluation "
            "did not follow"
        )
    return Finding(
        cause=Cause.LENGTH_REWARD,
        severity=Severity.CRITICAL if both is not None else Severity.WARN,
        since=first if both is None else both.first_step,
        summary=summary,
        evidence=(*(() if both is None else _reward_and_score(both)), *evidence),
    )


def reward_inverted(record: Record) -> Finding | None:
    """Training reward up, evaluation down, length not the reason."""
    both = _overstated(record)
    if both is None or length_reward(record) is not None:
        return None
    if not any(fall.falls(SCORE_ERRORS) and -fall.size >= LEAST_FALL for fall in (both.score, both.ends)):
        return None
    return Finding(
        cause=Cause.REWARD_INVERTED,
        severity=Severity.CRITICAL,
        since=both.first_step,
        summary=(
            f"the training reward rose from {both.reward.before:.2f} to {both.reward.after:.2f} while the evaluation "
            f"fell from {both.first_score:.2f} to {both.last_score:.2f}"
        ),
        evidence=_reward_and_score(both),
    )


def reward_detached(record: Record) -> Finding | None:
    """Training reward up, evaluation flat, and nothing above says why."""
    both = _overstated(record)
    if both is None or length_reward(record) is not None or reward_inverted(record) is not None:
        return None
    return Finding(
        cause=Cause.REWARD_DETACHED,
        severity=Severity.CRITICAL,
        since=both.first_step,
        summary=(
            f"the training reward rose from {both.reward.before:.2f} to {both.reward.after:.2f}, the evaluation went "
            f"from {both.first_score:.2f} to {both.last_score:.2f}"
        ),
        evidence=_reward_and_score(both),
    )


def easy_prompts(record: Record) -> Finding | None:
    """Nearly all groups are solved, and the evaluation is not; by a reward that can be believed."""
    solved, alike = record.column("all_correct_groups")[-WINDOW:], record.column("zero_variance_groups")[-WINDOW:]
    every = lines(record)
    if solved.size < WINDOW or not every or min(level(solved), level(alike)) < EASY_SHARE:
        return None
    if length_reward(record) is not None or reward_inverted(record) is not None:
        return None
    newest, reward = every[-1].points[-1], level(record.column("reward_mean")[-WINDOW:])
    score, error = newest.number("score"), newest.number("stderr")
    if not reward - score > max(EASY_GAP, SCORE_ERRORS * error):
        return None
    first, last, version = int(record.steps[-WINDOW]), record.last_step, int(newest.number("version"))
    flags = record.column("all_correct_groups") >= EASY_SHARE / 2
    return Finding(
        cause=Cause.EASY_PROMPTS,
        severity=Severity.WARN,
        since=since(record.steps, flags),
        summary=(
            f"{level(solved):.0%} of the trained groups are solved by every sample, while the evaluation stands at "
            f"{score:.2f}"
        ),
        evidence=(
            Evidence(
                series="all_correct_groups",
                first_step=first,
                last_step=last,
                numbers=(("mean", level(solved)), ("limit", EASY_SHARE)),
            ),
            Evidence(
                series="eval_score",
                first_step=version,
                last_step=version,
                numbers=(("score", score), ("training reward", reward)),
            ),
        ),
    )


def hard_prompts(record: Record) -> Finding | None:
    """Nearly no group has a right answer."""
    wrong = record.column("all_wrong_groups")[-WINDOW:]
    if (
        wrong.size < WINDOW
        or share(wrong >= HARD_SHARE) < PERSISTENCE
        or not level(record.column("all_wrong_groups")[:WINDOW]) >= HARD_FROM_START
    ):
        return None
    first, last = int(record.steps[-WINDOW]), record.last_step
    return Finding(
        cause=Cause.HARD_PROMPTS,
        severity=Severity.WARN,
        since=since(record.steps, record.column("all_wrong_groups") >= HARD_SHARE),
        summary=f"{level(wrong):.0%} of the trained groups have no right answer at all",
        evidence=(
            Evidence(
                series="all_wrong_groups",
                first_step=first,
                last_step=last,
                numbers=(("mean", level(wrong)), ("limit", HARD_SHARE)),
            ),
        ),
    )


def flat_reward(record: Record) -> Finding | None:
    """Groups without a difference that are neither right nor wrong."""
    alike = (
        record.column("zero_variance_groups") - record.column("all_correct_groups") - record.column("all_wrong_groups")
    )
    newest = alike[-WINDOW:]
    if newest.size < WINDOW or share(newest >= FLAT_SHARE) < PERSISTENCE:
        return None
    first, last, reward = int(record.steps[-WINDOW]), record.last_step, level(record.column("reward_mean")[-WINDOW:])
    return Finding(
        cause=Cause.FLAT_REWARD,
        severity=Severity.WARN,
        since=since(record.steps, alike >= FLAT_SHARE),
        summary=(
            f"{level(newest):.0%} of the trained groups got one and the same reward for all samples, neither right nor "
            f"wrong (mean {reward:.2f})"
        ),
        evidence=(
            Evidence(
                series="zero_variance_groups",
                first_step=first,
                last_step=last,
                numbers=(("mean", level(newest)), ("limit", FLAT_SHARE)),
            ),
        ),
    )


def solved(record: Record) -> Finding | None:
    """Entropy falls because groups are solved: learning, and no alarm."""
    entropy, right = (
        change(record.column("policy_entropy"), WINDOW),
        change(record.column("all_correct_groups"), WINDOW),
    )
    if entropy is None or right is None or entropy.ratio > ENTROPY_FALL or right.size < SOLVED_SHARE:
        return None
    first, last = int(record.steps[0]), record.last_step
    return Finding(
        cause=Cause.SOLVED,
        severity=Severity.INFO,
        since=first,
        summary=(
            f"entropy fell from {entropy.before:.2f} to {entropy.after:.2f} nats as solved groups rose from "
            f"{right.before:.0%} to {right.after:.0%}"
        ),
        evidence=(
            Evidence(
                series="policy_entropy",
                first_step=first,
                last_step=last,
                numbers=(("from", entropy.before), ("to", entropy.after)),
            ),
            Evidence(
                series="all_correct_groups",
                first_step=first,
                last_step=last,
                numbers=(("from", right.before), ("to", right.after)),
            ),
        ),
    )
