"""Layer 4, what the loop spends its time on: the store, the reward, or waiting for generation."""

from orchestrator.doctor.findings import Evidence, Finding, Severity
from orchestrator.doctor.trends import level
from orchestrator.doctor.windows import WINDOW, gained, newest
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.record import Record

WAITING = 0.5
"""Share of the time in which the trainer waits for groups, above which something else bounds the run."""
GENERATION_BOUND = 0.7
"""The same, above which it is said even where generation takes most of a group's time, as it mostly does."""
REWARD_PART = 0.5
"""Part of a group's time that its judgement takes, above which the reward is what is waited for."""
STORE = 0.5
"""Seconds of store calls in a second of the run, above which the store is slow: calls are short and few."""


def _share(record: Record, name: str) -> float:
    """What part of the newest rows' wall clock a phase took; NaN before there are enough rows."""
    if len(record) <= WINDOW:
        return float("nan")
    return level(record.column(name)[-WINDOW:]) / max(1e-9, level(record.column("step_seconds")[-WINDOW:]))


def _share_of_reward(record: Record) -> float:
    """Part of a group's time that its judgement takes."""
    reward, generation = (level(record.column(n)[-WINDOW:]) for n in ("reward_seconds", "generation_seconds"))
    return reward / (reward + generation) if reward + generation > 0 else 0.0


def slow_store(record: Record) -> Finding | None:
    """Calls of the store take as long as the steps themselves, and the trainer does little else."""
    if len(record) <= WINDOW:
        return None
    seconds = level(record.column("step_seconds")[-WINDOW:]) * WINDOW
    share = gained(record.column("store_seconds"), WINDOW) / seconds if seconds > 0 else 0.0
    if not share >= STORE or _share(record, "step_train_seconds") >= WAITING:
        return None
    return Finding(
        Cause.SLOW_STORE,
        Severity.WARN,
        int(record.steps[-WINDOW]),
        f"the loop's calls of the store took {share:.1f} seconds of every second (those at the same time added up)",
        (newest(record, "store_seconds", ("seconds a second", share), ("limit", STORE)),),
    )


def slow_reward(record: Record) -> Finding | None:
    """The trainer waits, and a group spends most of its time with the judge."""
    waits, part = _share(record, "step_wait_seconds"), _share_of_reward(record)
    if not (waits >= WAITING and part >= REWARD_PART):
        return None
    return Finding(
        Cause.SLOW_REWARD,
        Severity.WARN,
        int(record.steps[-WINDOW]),
        f"the trainer waits for groups {waits:.0%} of the time, and judging takes {part:.0%} of a group's time",
        (*_waiting(record, waits), newest(record, "reward_seconds", ("part of a group's time", part))),
    )


def trainer_waits(record: Record) -> Finding | None:
    """Generation bounds the run."""
    waits = _share(record, "step_wait_seconds")
    if not waits >= GENERATION_BOUND or slow_reward(record) is not None or slow_store(record) is not None:
        return None
    return Finding(
        Cause.TRAINER_WAITS,
        Severity.INFO,
        int(record.steps[-WINDOW]),
        f"the trainer waits for groups {waits:.0%} of the time: generation bounds the run",
        _waiting(record, waits),
    )


def _waiting(record: Record, waits: float) -> tuple[Evidence]:
    return (newest(record, "step_wait_seconds", ("share of the time", waits), ("limit", WAITING)),)
