"""Whether log-probs stand at other tokens than their own: places beside them, as where token-aligned and
next-token-aligned columns were mixed up, or in another row. Numpy only.

It owns these questions, and asks them of the rows that fail: a fault of one row in ten is small in the sum. It must
never know a model, and it moves nothing.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.types.evidence import Check, CheckFinding

CLOSED_SHARE = 0.8
"""A shift is reported if it closes this share of the gap, as for every cause that is true of all tokens or of none."""
LEAST_TOKENS = 4
"""Fewer tokens match too easily."""
MOST_ROWS = 512
"""Rows that are compared with every other of their length."""
_PLACES = {
    1: "one place early: entry t is about token t + 1, as in layout next_token",
    -1: "one place late: entry t is about token t - 1",
    2: "two places early",
    -2: "two places late",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedRow:
    """One row of a dump beside its scores. Arrays are token-aligned."""

    number: int
    """From 0."""
    scores: NDArray[np.float32]
    """[T] nats, by the trainer."""
    logged: NDArray[np.float32]
    """[T] nats, as in the dump."""
    mask: NDArray[np.bool_]
    """[T] tokens that were sampled and scored; a pair of neighbours counts where both were."""

    @property
    def gaps(self) -> NDArray[np.float64]:
        """[n] |d| in nats, where scored."""
        return np.abs(self.scores[self.mask].astype(np.float64) - self.logged[self.mask].astype(np.float64))


def check_places(failing: Sequence[LoggedRow], rows: Sequence[LoggedRow]) -> dict[int, CheckFinding]:
    """Number of a row -> a finding, for the rows whose log agrees with other scores by at least 80 % of the gap: moved
    by some places, or those of another row.

    Args:
        failing: the rows that fail by themselves.
        rows: all of them.
    """
    return _shifted(failing) or _exchanged(failing, rows)


def _shifted(rows: Sequence[LoggedRow]) -> dict[int, CheckFinding]:
    """One shift explains all rows together; the finding is about those that it helps."""
    for offset, where in (*_PLACES.items(), (None, "as many places early as the prompt is long")):
        pairs = [_pairs(row, offset) for row in rows]
        straight, moved = (float(sum(pair[which].sum() for pair in pairs)) for which in (0, 1))
        enough = sum(pair[0].size for pair in pairs) >= LEAST_TOKENS
        if enough and straight > 0.0 and moved <= (1.0 - CLOSED_SHARE) * straight:
            return {
                row.number: CheckFinding.failure(Check.STRUCTURE, "logprobs_shifted", _detail(*pair, where))
                for row, pair in zip(rows, pairs, strict=True)
                if pair[1].sum() < 0.5 * pair[0].sum()
            }
    return {}


def _detail(straight: NDArray[np.float64], moved: NDArray[np.float64], where: str) -> str:
    return f"mean |d| {straight.mean():.3g} nats as logged and {moved.mean():.3g} moved; the log is {where}"


def _pairs(row: LoggedRow, offset: int | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """|d| of the same entries of the log against their own token, and against the token `offset` places on (None: as
    many as were given before the first sampled one)."""
    places = int(row.mask.argmax()) if offset is None else offset
    size = row.mask.size
    if not 0 < abs(places) < size:
        return np.zeros(0), np.zeros(0)
    here, there = (
        (slice(0, size - places), slice(places, size)) if places > 0 else (slice(-places, size), slice(0, places))
    )
    both = row.mask[here] & row.mask[there]
    log = row.logged[here][both].astype(np.float64)
    straight, moved = (np.abs(row.scores[place][both].astype(np.float64) - log) for place in (here, there))
    return straight, moved


def _exchanged(failing: Sequence[LoggedRow], rows: Sequence[LoggedRow]) -> dict[int, CheckFinding]:
    """Rows whose log fits the scores of another row with as many sampled tokens."""
    alike: defaultdict[int, list[LoggedRow]] = defaultdict(list)
    for row in rows[:MOST_ROWS]:
        alike[int(row.mask.sum())].append(row)
    found: dict[int, CheckFinding] = {}
    closed = 0.0
    for row in failing[:MOST_ROWS]:
        logged, own = row.logged[row.mask].astype(np.float64), float(row.gaps.mean())
        others = alike[logged.size] if logged.size >= LEAST_TOKENS else []
        gaps = [float(np.abs(other.scores[other.mask] - logged).mean()) for other in others]
        if not gaps or min(gaps) > (1.0 - CLOSED_SHARE) * own:
            continue
        best = int(np.argmin(gaps))
        closed += (own - gaps[best]) * logged.size
        detail = (
            f"mean |d| {own:.3g} nats against its own tokens and {gaps[best]:.3g} against those of row "
            f"{others[best].number}: log-probs and tokens were ordered otherwise"
        )
        found[row.number] = CheckFinding.failure(Check.STRUCTURE, "logprobs_of_another_row", detail)
    return found if closed >= CLOSED_SHARE * sum(row.gaps.sum() for row in failing) else {}
