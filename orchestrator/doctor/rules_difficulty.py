"""Layer 1, what the rules of `rules_data` leave over: prompts of the wrong difficulty, groups without a difference,
longer answers."""

from orchestrator.doctor.evaluations import compared
from orchestrator.doctor.findings import Evidence, Finding, Severity
from orchestrator.doctor.rules_data import (
    EASY_SHARE,
    HARD_FROM_START,
    LEAST_EVALUATIONS,
    LENGTH_GROWTH,
    PERSISTENCE,
    REWARD_ERRORS,
    WINDOW,
    easy_prompts,
    flat_reward,
    hard_prompts,
    length_reward,
)
from orchestrator.doctor.trends import change, level, share, since
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record

LEAST_PASS = 0.3
MOST_PASS = 0.7
"""Mean reward, of rewards between 0 and 1, between which prompts teach most."""
ALIKE_SHARE = 0.8
"""Share of groups without any difference, above which little is learned from a batch."""
UNSOLVED_SHARE = 0.2
"""Share of groups without any difference that are not solved: with fewer, the policy is simply right."""


def length_growth(record: Record) -> Finding | None:
    """Answers grow, and no evaluation says whether for the better."""
    length = change(record.column("length_mean"), WINDOW)
    if length is None or length.ratio < LENGTH_GROWTH or not length.rises(REWARD_ERRORS):
        return None
    if compared(record, LEAST_EVALUATIONS) is not None or length_reward(record) is not None:
        return None
    first, last = int(record.steps[0]), record.last_step
    numbers = (("from", length.before), ("to", length.after), ("limit of the ratio", LENGTH_GROWTH))
    return Finding(
        cause=Cause.LENGTH_GROWTH,
        severity=Severity.INFO,
        since=first,
        summary=(
            f"length grew from {length.before:.3g} to {length.after:.3g} tokens, and there are too few evaluations to "
            "say whether for the better"
        ),
        evidence=(Evidence(series="length_mean", first_step=first, last_step=last, numbers=numbers),),
    )


def wrong_difficulty(record: Record) -> Finding | None:
    """The mean pass rate lies outside 30 to 70 %; a warning where most groups are lost or solved from the start, and
    the reward does not rise."""
    rewards = record.column("reward_mean")
    newest, moved = rewards[-WINDOW:], change(rewards, WINDOW)
    outside = (newest < LEAST_PASS) | (newest > MOST_PASS)
    told = any(rule(record) is not None for rule in (easy_prompts, hard_prompts, flat_reward))
    if newest.size < WINDOW or share(outside) < PERSISTENCE or told or not 0.0 <= level(newest) <= 1.0:
        return None
    if moved is not None and moved.falls(REWARD_ERRORS):
        return None  # the policy was lost, not the prompts chosen wrongly
    low = level(newest) < LEAST_PASS
    name, limit = ("all_wrong_groups", HARD_FROM_START) if low else ("all_correct_groups", EASY_SHARE)
    ends = [level(record.column(name)[part]) for part in (slice(WINDOW), slice(-WINDOW, None))]
    if max(level(record.column(which)[-WINDOW:]) for which in ("all_wrong_groups", "all_correct_groups")) <= 0:
        return None  # rewards that have no right and wrong have no difficulty either
    stuck = moved is not None and not moved.rises(REWARD_ERRORS) and min(ends) >= limit
    first, last = int(record.steps[-WINDOW]), record.last_step
    return Finding(
        cause=Cause.WRONG_DIFFICULTY,
        severity=Severity.WARN if stuck else Severity.INFO,
        since=since(record.steps, (rewards < LEAST_PASS) if low else (rewards > MOST_PASS)),
        summary=(
            f"the mean reward is {level(newest):.2f}, outside {LEAST_PASS:.0%} to {MOST_PASS:.0%}, and {ends[1]:.0%} of"
            f" the trained groups are {'lost' if low else 'solved'} by every sample"
        ),
        evidence=(
            Evidence(
                series="reward_mean",
                first_step=first,
                last_step=last,
                numbers=(("mean", level(newest)), ("limit", LEAST_PASS if low else MOST_PASS)),
            ),
            Evidence(
                series=name,
                first_step=first,
                last_step=last,
                numbers=(("at the start", ends[0]), ("now", ends[1]), ("limit", limit)),
            ),
        ),
    )


def groups_alike(record: Record) -> Finding | None:
    """Most groups have no difference, many of them unsolved, and no rule above says why."""
    alike = record.column("zero_variance_groups")
    unsolved, moved = alike - record.column("all_correct_groups"), change(record.column("reward_mean"), WINDOW)
    newest = alike[-WINDOW:]
    if (
        newest.size < WINDOW
        or share(newest >= ALIKE_SHARE) < PERSISTENCE
        or not level(unsolved[-WINDOW:]) >= UNSOLVED_SHARE
    ):
        return None
    if moved is None or moved.falls(REWARD_ERRORS):
        return None  # the policy was lost, or nobody can say yet
    found = [rule(record) for rule in (hard_prompts, flat_reward, wrong_difficulty)]
    if any(one is not None and one.severity is not Severity.INFO for one in found):
        return None
    first, last = int(record.steps[-WINDOW]), record.last_step
    numbers = (("mean", level(newest)), ("limit", ALIKE_SHARE), ("of them unsolved", level(unsolved[-WINDOW:])))
    return Finding(
        cause=Cause.GROUPS_ALIKE,
        severity=Severity.WARN,
        since=since(record.steps, alike >= ALIKE_SHARE),
        summary=(
            f"{level(newest):.0%} of the trained groups have no difference in reward, {level(unsolved[-WINDOW:]):.0%} "
            "of all without being solved"
        ),
        evidence=(Evidence(series="zero_variance_groups", first_step=first, last_step=last, numbers=numbers),),
    )
