"""Layer 1, what the reward teaches: whether the evaluation follows it, and what it follows itself. Each rule is a pure
function of a record; windows are in rows, thresholds are named above the rules that use them."""

import numpy as np

from orchestrator.doctor.evaluations import LEAST_ERROR, NEAR_STEPS, Comparison, Line, compared, lines
from orchestrator.doctor.findings import Evidence, Finding, Severity
from orchestrator.doctor.trends import change, level, share
from orchestrator.doctor.windows import PERSISTENCE, WINDOW, moved
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record, Values

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
MOST_POINTS = 20
"""Scores, evenly spaced, that are held against the rewards about them."""
LEAST_LOSS = 0.2
"""Fall of the evaluation that counts while the training reward only stands."""
LENGTH_GROWTH = 1.3
"""Growth of the mean length that counts beside a reward that the evaluation does not follow."""
TIED_ERRORS = 2.0
"""Standard errors by which length must have grown where the reward follows it anyway."""
LENGTH_CORRELATION = 0.6
"""Correlation of reward and length within groups above which the reward is a function of length."""
LEAST_CORRELATIONS = 5
"""Steps with a correlation at all: where every answer reaches the limit there is none."""
FEW_PROMPTS = 0.5
"""Share of different prompts among the newest groups, below which a rising reward may be memory."""
OFF = 0.15
"""By which training reward and evaluation must lie apart, in both halves of the run."""


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


def _evaluation_lost(record: Record) -> Comparison | None:
    """The evaluation falls far while the training reward stands: not so on a handful of prompts."""
    both = compared(record, LEAST_EVALUATIONS)
    if both is None or level(record.column("distinct_prompts")[-WINDOW:]) < FEW_PROMPTS:
        return None
    stands = not both.reward.falls(TIED_ERRORS) and both.reward.size > -LEAST_RISE * level(record.column("reward_std"))
    lost = both.ends.falls(REWARD_ERRORS) and -both.ends.size >= LEAST_LOSS
    return both if stands and lost else None


def _reward_and_score(both: Comparison) -> tuple[Evidence, ...]:
    first, last = both.first_step, both.last_step
    score = (
        ("first", both.first_score),
        ("last", both.last_score),
        ("change of the fitted line", both.score.size),
        ("its standard error", both.score.error),
    )
    return (
        Evidence("reward_mean", first, last, (("from", both.reward.before), ("to", both.reward.after))),
        Evidence("eval_score", first, last, score),
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
    evidence = [moved(record, "length_mean", length)]
    if measured:
        numbers = (("mean", level(correlation)), ("limit", LENGTH_CORRELATION))
        begin, end = int(record.steps[rows[0]]), int(record.steps[rows[-1]])
        evidence.append(Evidence("reward_length_correlation", begin, end, numbers))
    growth = f"length grew from {length.before:.3g} to {length.after:.3g} tokens"
    if both is None:
        summary = f"{growth}, and within groups the reward goes with it (correlation {level(correlation):.2f})"
        return Finding(Cause.LENGTH_REWARD, Severity.WARN, int(record.steps[0]), summary, tuple(evidence))
    summary = (
        f"{growth} while the reward rose from {both.reward.before:.2f} to {both.reward.after:.2f} and the evaluation "
        "did not follow"
    )
    evidence = [*_reward_and_score(both), *evidence]
    return Finding(Cause.LENGTH_REWARD, Severity.CRITICAL, both.first_step, summary, tuple(evidence))


def _against_evaluation(cause: Cause, both: Comparison, went: str) -> Finding:
    """Training reward up, and the evaluation `went` otherwise."""
    summary = (
        f"the training reward went from {both.reward.before:.2f} to {both.reward.after:.2f}{went} from "
        f"{both.first_score:.2f} to {both.last_score:.2f}"
    )
    return Finding(cause, Severity.CRITICAL, both.first_step, summary, _reward_and_score(both))


def reward_inverted(record: Record) -> Finding | None:
    """Training reward up, evaluation down, length not the reason."""
    lost = _evaluation_lost(record)
    both = _overstated(record) or (lost if lost is not None and lost.reward.rises(TIED_ERRORS) else None)
    if both is None or length_reward(record) is not None:
        return None
    if not any(fall.falls(SCORE_ERRORS) and -fall.size >= LEAST_FALL for fall in (both.score, both.ends)):
        return None
    return _against_evaluation(Cause.REWARD_INVERTED, both, " while the evaluation fell")


def reward_detached(record: Record) -> Finding | None:
    """Training reward up and evaluation flat, or evaluation lost and training reward flat, and nothing above says
    why."""
    both = _overstated(record) or _evaluation_lost(record)
    if both is None or length_reward(record) is not None or reward_inverted(record) is not None:
        return None
    return _against_evaluation(Cause.REWARD_DETACHED, both, ", the evaluation went")


def length_growth(record: Record) -> Finding | None:
    """Answers grow, and no evaluation says whether for the better."""
    length = change(record.column("length_mean"), WINDOW)
    if length is None or length.ratio < LENGTH_GROWTH or not length.rises(REWARD_ERRORS):
        return None
    if compared(record, LEAST_EVALUATIONS) is not None or length_reward(record) is not None:
        return None
    return Finding(
        Cause.LENGTH_GROWTH,
        Severity.INFO,
        int(record.steps[0]),
        f"length grew from {length.before:.3g} to {length.after:.3g} tokens, and there are too few evaluations to say "
        "whether for the better",
        (moved(record, "length_mean", length, ("limit of the ratio", LENGTH_GROWTH)),),
    )


def reward_off_evaluation(record: Record) -> Finding | None:
    """Training gives less than the evaluation for the same versions, from the start. `info` where the evaluation may be
    another task: greedy, or on prompts of another file."""
    every = lines(record)
    if not every:
        return None
    newest = every[-1].points[-1]
    sizes, errors = _above_reward(record, every[-1])
    if sizes.size < LEAST_EVALUATIONS or min(level(half) for half in np.array_split(sizes, 2)) < OFF:
        return None
    if not sizes.mean() > REWARD_ERRORS * float(np.sqrt(np.square(errors).sum())) / sizes.size:
        return None
    sampled = '"temperature":1.0,"top_k":0,' in newest.text("part_sampling").replace(" ", "")
    held_out = newest.text("part_environment") not in ("", "jsonl")
    first, last = every[-1].steps
    return Finding(
        Cause.REWARD_OFF_EVALUATION,
        Severity.WARN if sampled and held_out else Severity.INFO,
        int(record.steps[0]),
        f"the training reward lies {sizes.mean():.2f} below the evaluation of the same versions, from the start",
        (Evidence("eval_score", first, last, (("mean difference", float(sizes.mean())), ("limit", OFF))),),
    )


def _above_reward(record: Record, line: Line) -> tuple[Values, Values]:
    """By how much scores lie above the training reward of the steps about them, with standard errors. A score that does
    not say its version has no such steps."""
    rewards, found = record.column("reward_mean"), list[tuple[float, float]]()
    points = [point for point in line.points if np.isfinite(point.number("version"))]
    for point in points[:: 1 + len(points) // MOST_POINTS]:
        version = int(point.number("version"))
        first, last = np.searchsorted(record.steps, (version - NEAR_STEPS, version + NEAR_STEPS + 1)).tolist()
        near = rewards[first:last][np.isfinite(rewards[first:last])]
        if near.size >= NEAR_STEPS:
            error = max(LEAST_ERROR, point.number("stderr"))
            found.append((point.number("score") - level(near), float(np.hypot(error, near.std() / near.size**0.5))))
    values = np.array(found, dtype=np.float64).reshape(-1, 2)
    return values[:, 0], values[:, 1]
