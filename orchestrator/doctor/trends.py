"""Small statistics over series with gaps: levels, rises, shares of steps, a weighted line. NaN is a gap everywhere."""

from dataclasses import dataclass

import numpy as np

from orchestrator.run_dir.record import Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How far a series moved over a stretch."""

    before: float
    after: float
    error: float
    """Standard error of `after - before`."""

    @property
    def size(self) -> float:
        """`after - before`."""
        return self.after - self.before

    @property
    def ratio(self) -> float:
        """`after / before`; 1 where either is not positive."""
        return self.after / self.before if self.before > 0 and self.after > 0 else 1.0

    def rises(self, errors: float = 4.0) -> bool:
        """Whether it went up by more than so many standard errors."""
        return self.size > errors * self.error

    def falls(self, errors: float = 4.0) -> bool:
        """Whether it went down by more than so many standard errors."""
        return -self.size > errors * self.error


def level(values: Values) -> float:
    """Mean of what is finite; NaN where nothing is."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


def rolling(values: Values, window: int) -> Values:
    """[n - window + 1] means of `window` values in a row; NaN where one of them is."""
    return np.convolve(values, np.full(window, 1.0 / window), mode="valid").astype(np.float64)


def change(values: Values, window: int) -> Change | None:
    """Change from the first `window` finite values to the last `window`; None where they would overlap."""
    finite = values[np.isfinite(values)]
    if finite.size < 2 * window:
        return None
    first, last = finite[:window], finite[-window:]
    error = float(np.sqrt((first.var(ddof=1) + last.var(ddof=1)) / window)) if window > 1 else 0.0
    return Change(before=float(first.mean()), after=float(last.mean()), error=error)


def share(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> float:
    """Share of True; 0 of nothing."""
    return float(flags.mean()) if flags.size else 0.0


def fitted_change(at: Values, values: Values, errors: Values) -> Change:
    """Change over the whole stretch of `at`, by a straight line through values with known standard errors."""
    weights = 1.0 / np.square(errors)
    total = weights.sum()
    centre = float((weights * at).sum() / total)
    spread = float((weights * np.square(at - centre)).sum())
    slope = float((weights * (at - centre) * values).sum() / spread)
    middle = float((weights * values).sum() / total)
    first, last = float(at[0]), float(at[-1])
    return Change(
        before=middle + slope * (first - centre),
        after=middle + slope * (last - centre),
        error=(last - first) / float(np.sqrt(spread)),
    )


def since(steps: np.ndarray[tuple[int], np.dtype[np.int64]], flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Step at which the last unbroken stretch of True began, a gap of one step allowed; the last step where none is
    True."""
    begun = int(steps[-1]) if steps.size else 0
    missed = 0
    for step, flag in zip(steps[::-1].tolist(), flags[::-1].tolist(), strict=True):
        if flag:
            begun, missed = step, 0
        else:
            missed += 1
            if missed > 1:
                break
    return begun
