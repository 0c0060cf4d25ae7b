"""Layer 1, whether prompts teach: too easy, too hard, of one reward for all, or without a difference in a group."""

from orchestrator.doctor.evaluations import lines
from orchestrator.doctor.findings import Evidence, Finding, Severity
from orchestrator.doctor.rules.policy import FIRST, lost
from orchestrator.doctor.rules.reward import (
    REWARD_ERRORS,
    SCORE_ERRORS,
    length_reward,
    reward_detached,
    reward_inverted,
)
from orchestrator.doctor.trends import change, level, since
from orchestrator.doctor.windows import WINDOW, held, moved, newest
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record

EASY_SHARE = 0.5
"""Share of groups without any difference, all of them right, above which prompts are easy."""
EASY_GAP = 0.15
"""By which the evaluation must lie below the training reward for that to be more than the end of learning."""
HARD_SHARE = 0.9
"""Share of groups without a right answer above which prompts are too hard."""
HARD_FROM_START = 0.5
"""The same at the start of the run: where groups were solved before, the policy was lost, not the prompts."""
FLAT_SHARE = 0.5
"""Share of groups without any difference, neither solved nor lost, above which the reward does not distinguish
answers."""
LEAST_PASS = 0.3
MOST_PASS = 0.7
"""Mean reward, of rewards between 0 and 1, between which prompts teach most."""
ALIKE_SHARE = 0.8
"""Share of groups without any difference, above which little is learned from a batch."""
FEW_PROMPTS = 0.5
"""Share of different prompts among the newest groups, below which they are few."""
UNSOLVED_SHARE = 0.2
"""Share of groups without any difference that are not solved: with fewer, the policy is simply right."""
ENTROPY_FALL = 0.6
"""Entropy over what it was, below which it has fallen."""
SOLVED_SHARE = 0.3
"""Rise of the share of solved groups that explains a fall of entropy."""


def easy_prompts(record: Record) -> Finding | None:
    """Nearly all groups are solved, and the evaluation is not; by a reward that can be believed."""
    solved, alike = record.column("all_correct_groups")[-WINDOW:], record.column("zero_variance_groups")[-WINDOW:]
    every = lines(record)
    if solved.size < WINDOW or not every or min(level(solved), level(alike)) < EASY_SHARE:
        return None
    if length_reward(record) is not None or reward_inverted(record) is not None or _by_heart(record):
        return None
    point, reward = every[-1].points[-1], level(record.column("reward_mean")[-WINDOW:])
    score, version = point.number("score"), int(point.number("version"))
    if not reward - score > max(EASY_GAP, SCORE_ERRORS * point.number("stderr")):
        return None
    return Finding(
        Cause.EASY_PROMPTS,
        Severity.WARN,
        since(record.steps, record.column("all_correct_groups") >= EASY_SHARE / 2),
        f"{level(solved):.0%} of the trained groups are solved by every sample, while the evaluation stands at "
        f"{score:.2f}",
        (
            newest(record, "all_correct_groups", ("mean", level(solved)), ("limit", EASY_SHARE)),
            Evidence("eval_score", version, version, (("score", score), ("training reward", reward))),
        ),
    )


def _by_heart(record: Record) -> bool:
    """Whether prompts are few and were not solved from the start: what is solved now is known by heart."""
    few = level(record.column("distinct_prompts")[-WINDOW:]) < FEW_PROMPTS
    return few and level(record.column("all_correct_groups")[:FIRST]) < EASY_SHARE


def hard_prompts(record: Record) -> Finding | None:
    """Nearly no group has a right answer."""
    wrong = record.column("all_wrong_groups")
    found = held(record, wrong, wrong >= HARD_SHARE)
    if found is None or not level(wrong[:FIRST]) >= HARD_FROM_START or lost(record):
        return None
    return Finding(
        Cause.HARD_PROMPTS,
        Severity.WARN,
        found.since,
        f"{found.level:.0%} of the trained groups have no right answer at all",
        (newest(record, "all_wrong_groups", ("mean", found.level), ("limit", HARD_SHARE)),),
    )


def flat_reward(record: Record) -> Finding | None:
    """Groups without a difference that are neither right nor wrong."""
    alike = (
        record.column("zero_variance_groups") - record.column("all_correct_groups") - record.column("all_wrong_groups")
    )
    if (found := held(record, alike, alike >= FLAT_SHARE)) is None:
        return None
    reward = level(record.column("reward_mean")[-WINDOW:])
    return Finding(
        Cause.FLAT_REWARD,
        Severity.WARN,
        found.since,
        f"{found.level:.0%} of the trained groups got one and the same reward for all samples, neither right nor wrong "
        f"(mean {reward:.2f})",
        (newest(record, "zero_variance_groups", ("mean", found.level), ("limit", FLAT_SHARE)),),
    )


def solved(record: Record) -> Finding | None:
    """Most groups are solved by every sample, and no evaluation speaks against it: what learning looks like near its
    end, or prompts in which nothing was left to learn from the start. Or entropy falls on the way there."""
    rewards, right = record.column("reward_mean"), record.column("all_correct_groups")
    entropy, rise = change(record.column("policy_entropy"), WINDOW), change(right, WINDOW)
    falls = entropy is not None and rise is not None and entropy.ratio <= ENTROPY_FALL and rise.size >= SOLVED_SHARE
    now = held(record, right, (right >= EASY_SHARE) & (rewards > MOST_PASS))
    if now is None and not falls:
        return None
    against = (easy_prompts, length_reward, reward_inverted, reward_detached)
    if lost(record) or any(rule(record) is not None for rule in against):
        return None
    first, last = level(right[:FIRST]), level(right[-WINDOW:])
    told = f"{last:.0%} of the trained groups are solved by every sample (mean reward {level(rewards[-WINDOW:]):.2f})"
    evidence = [newest(record, "all_correct_groups", ("at the start", first), ("now", last), ("limit", EASY_SHARE))]
    if first >= EASY_SHARE:
        told += ", most of them from the start: there was little left to learn"
    if entropy is not None and falls:
        told += f"; entropy fell from {entropy.before:.2f} to {entropy.after:.2f} nats on the way"
        evidence.append(moved(record, "policy_entropy", entropy))
    begun = int(record.steps[0]) if now is None else now.since
    return Finding(Cause.SOLVED, Severity.INFO, begun, told, tuple(evidence))


def wrong_difficulty(record: Record) -> Finding | None:
    """The mean pass rate lies outside 30 to 70 %, and groups are not simply solved; a warning where most are lost from
    the start, and the reward does not rise."""
    rewards = record.column("reward_mean")
    low = level(rewards[-WINDOW:]) < LEAST_PASS
    outside = (rewards < LEAST_PASS) | (rewards > MOST_PASS)
    found = held(record, rewards, outside, (rewards < LEAST_PASS) if low else (rewards > MOST_PASS))
    explained = any(rule(record) is not None for rule in (easy_prompts, hard_prompts, flat_reward))
    if found is None or explained or not 0.0 <= found.level <= 1.0:
        return None
    reward = change(rewards, WINDOW)
    if lost(record) or solved(record) is not None:
        return None  # the policy, not the prompts chosen wrongly; or nothing is wrong
    name, limit = ("all_wrong_groups", HARD_FROM_START) if low else ("all_correct_groups", EASY_SHARE)
    ends = [level(record.column(name)[part]) for part in (slice(FIRST), slice(-WINDOW, None))]
    if max(level(record.column(which)[-WINDOW:]) for which in ("all_wrong_groups", "all_correct_groups")) <= 0:
        return None  # rewards that have no right and wrong have no difficulty either
    stuck = reward is not None and not reward.rises(REWARD_ERRORS) and min(ends) >= limit
    return Finding(
        Cause.WRONG_DIFFICULTY,
        Severity.WARN if stuck else Severity.INFO,
        found.since,
        f"the mean reward is {found.level:.2f}, outside {LEAST_PASS:.0%} to {MOST_PASS:.0%}, and {ends[1]:.0%} of the "
        f"trained groups are {'lost' if low else 'solved'} by every sample",
        (
            newest(record, "reward_mean", ("mean", found.level), ("limit", LEAST_PASS if low else MOST_PASS)),
            newest(record, name, ("at the start", ends[0]), ("now", ends[1]), ("limit", limit)),
        ),
    )


def groups_alike(record: Record) -> Finding | None:
    """Most groups have no difference, many of them unsolved, and no rule above says why."""
    alike = record.column("zero_variance_groups")
    unsolved = level((alike - record.column("all_correct_groups"))[-WINDOW:])
    found, reward = held(record, alike, alike >= ALIKE_SHARE), change(record.column("reward_mean"), WINDOW)
    if found is None or not unsolved >= UNSOLVED_SHARE:
        return None
    if reward is None or lost(record):
        return None  # the policy was lost, or nobody can say yet
    others = [rule(record) for rule in (hard_prompts, flat_reward, wrong_difficulty)]
    if any(one is not None and one.severity is not Severity.INFO for one in others):
        return None
    numbers = (("mean", found.level), ("limit", ALIKE_SHARE), ("of them unsolved", unsolved))
    return Finding(
        Cause.GROUPS_ALIKE,
        Severity.WARN,
        found.since,
        f"{found.level:.0%} of the trained groups have no difference in reward, {unsolved:.0%} of all without being "
        "solved",
        (newest(record, "zero_variance_groups", *numbers),),
    )


def few_prompts(record: Record) -> Finding | None:
    """The same prompts come round and round."""
    distinct = record.column("distinct_prompts")
    if (found := held(record, distinct, distinct < FEW_PROMPTS)) is None or easy_prompts(record) is not None:
        return None
    return Finding(
        Cause.FEW_PROMPTS,
        Severity.WARN,
        found.since,
        f"only {found.level:.0%} of the newest groups (at most 64) are of different prompts",
        (newest(record, "distinct_prompts", ("mean", found.level), ("limit", FEW_PROMPTS)),),
    )
