"""Evaluations as the rules see them: scores of one configuration are a line, those of another are another line."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from orchestrator.doctor.trends import Change, fitted_change, level
from orchestrator.run_dir.record import Record, RunEvent, Values

KIND = "evaluation"
LEAST_ERROR = 0.02
"""Standard error that no score is believed below: prompts are few, and a score of 0 or 1 says nothing of its own
error."""
AROUND = 3
"""Scores that are taken together where two times are compared."""
NEAR_STEPS = 5
"""Training reward at an evaluation: mean over the steps this near to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Scores of one configuration, oldest first."""

    fingerprint: str
    points: tuple[RunEvent, ...]

    @property
    def steps(self) -> tuple[int, int]:
        """First and last version scored."""
        return int(self.points[0].number("version")), int(self.points[-1].number("version"))


def lines(record: Record) -> list[Line]:
    """One a stretch of equal fingerprints. A score that could not be taken has none."""
    scored = [event for event in record.of_kind(KIND) if np.isfinite(event.number("score"))]
    return [
        Line(fingerprint=fingerprint, points=tuple(points))
        for fingerprint, points in groupby(scored, lambda event: event.text("fingerprint"))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Training reward and evaluation over the same stretch of steps."""

    first_step: int
    last_step: int
    reward: Change
    score: Change
    """Change of the score by the fitted line, which may leave the range of scores."""
    ends: Change
    """Change from the first quarter of the scores to the last: a line does not see a fall that is over soon."""
    first_score: float
    last_score: float


def score_change(record: Record, first_step: int, last_step: int) -> Change | None:
    """From the scores about the first step to those about the last, of the newest line; None where it has none on one
    side, or the same on both."""
    every = lines(record)
    points = every[-1].points if every else ()
    middle = (first_step + last_step) / 2
    early = [point for point in points if point.number("version") < middle]
    late = [point for point in points if point.number("version") >= middle]
    if not early or not late:
        return None
    begin = [point for point in early if point.number("version") <= first_step + NEAR_STEPS] or early[:1]
    end = [point for point in late if point.number("version") >= last_step - 2 * NEAR_STEPS] or late[-1:]
    (before, before_error), (after, after_error) = (
        _mean(np.array([p.number("score") for p in side]), _errors(side)) for side in (begin[-AROUND:], end[-AROUND:])
    )
    return Change(before=before, after=after, error=float(np.hypot(before_error, after_error)))


def _errors(points: Sequence[RunEvent]) -> Values:
    """Standard errors of scores, none below `LEAST_ERROR`."""
    errors = np.array([point.number("stderr") for point in points])
    return np.maximum(np.where(np.isfinite(errors), errors, LEAST_ERROR), LEAST_ERROR)


def compared(record: Record, least_points: int) -> Comparison | None:
    """Training reward and score over the newest line of evaluations; None with fewer points than `least_points`."""
    every = lines(record)
    points = every[-1].points if every else ()
    if not points or len(points) < least_points:
        return None
    versions = np.array([point.number("version") for point in points])
    if not versions[-1] > versions[0]:
        return None
    errors = _errors(points)
    scores = np.array([point.number("score") for point in points])
    quarter = max(1, len(points) // 4)
    begin, end = (_mean(scores[part], errors[part]) for part in (slice(quarter), slice(-quarter, None)))
    reward = _reward_between(record, versions)
    if reward is None:
        return None
    return Comparison(
        first_step=int(versions[0]),
        last_step=int(versions[-1]),
        reward=reward,
        score=fitted_change(versions, scores, errors),
        ends=Change(before=begin[0], after=end[0], error=float(np.hypot(begin[1], end[1]))),
        first_score=points[0].number("score"),
        last_score=points[-1].number("score"),
    )


def _mean(values: Values, errors: Values) -> tuple[float, float]:
    """Mean weighted by the errors, and its own standard error."""
    weights = 1.0 / np.square(errors)
    return float((weights * values).sum() / weights.sum()), float(1.0 / np.sqrt(weights.sum()))


def _reward_between(record: Record, versions: Values) -> Change | None:
    rewards = record.column("reward_mean")
    ends = [rewards[np.abs(record.steps - version) <= NEAR_STEPS] for version in (versions[0], versions[-1])]
    ends = [end[np.isfinite(end)] for end in ends]
    if any(end.size < 2 for end in ends):
        return None
    error = float(np.sqrt(sum(end.var(ddof=1) / end.size for end in ends)))
    return Change(before=level(ends[0]), after=level(ends[1]), error=error)
