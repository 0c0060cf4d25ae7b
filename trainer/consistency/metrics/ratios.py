"""Importance ratios of sampled tokens, and their split into what staleness and what the engine explain. Numpy only.

It owns the sign, d = log pi_train - log pi_rollout, and the rule that a position outside the mask is gone before
anything is subtracted or exponentiated. It must never know how log-probs were computed, which version is current, or
what becomes of a ratio.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
"""Log-probs in nats as they come: float32, or float64 in tests."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RatioSplit:
    """d_total = d_stale + d_engine, token by token. Arrays are [T] float64 in nats, 0 outside the mask."""

    d_total: NDArray[np.float64]
    """log pi_now - log pi_rollout."""
    d_stale: NDArray[np.float64]
    """log pi_now - log pi_beh: the optimizer steps since the token was sampled."""
    d_engine: NDArray[np.float64]
    """log pi_beh - log pi_rollout: engine against trainer at the version that sampled the token."""
    mask: NDArray[np.bool_]
    """[T] True where the three are known."""

    def __post_init__(self) -> None:
        if not self.d_total.shape == self.d_stale.shape == self.d_engine.shape == self.mask.shape:
            raise ValueError(
                f"a split has shapes {self.d_total.shape}, {self.d_stale.shape}, {self.d_engine.shape} and a mask "
                f"{self.mask.shape}; expected one [T]"
            )

    @property
    def total_ratio(self) -> NDArray[np.float64]:
        """[T] staleness ratio x engine ratio; 1 outside the mask."""
        return token_ratios(self.d_total, self.mask)

    @property
    def staleness_ratio(self) -> NDArray[np.float64]:
        """[T] pi_now / pi_beh; 1 outside the mask."""
        return token_ratios(self.d_stale, self.mask)

    @property
    def engine_ratio(self) -> NDArray[np.float64]:
        """[T] pi_beh / pi_rollout; 1 outside the mask."""
        return token_ratios(self.d_engine, self.mask)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LagEstimate:
    """Mean |d_total| by lag, and the line through it: an *estimate* of the split, for want of log-probs at the version
    that sampled."""

    lags: NDArray[np.int64]
    """[K] ascending; optimizer steps between the sampling and the scoring weights."""
    mean_abs: NDArray[np.float64]
    """[K] nats."""
    num_tokens: NDArray[np.int64]
    """[K]"""
    slope: float | None
    """Nats a step of lag: what staleness seems to cost. None with fewer than two lags, where no line can be told."""
    intercept: float | None
    """Nats at lag 0: what the engine seems to cost. None as `slope`."""


def masked_values(name: str, values: Floats, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[T] float64, 0 outside the mask whatever stood there.

    Args:
        name: what they are, for the message.
        values: [T]
        mask: [T]

    Raises:
        ValueError: the shapes differ, or a log-prob inside the mask is not finite.
    """
    if values.shape != mask.shape:
        raise ValueError(f"{name} have shape {values.shape}, their mask {mask.shape}; expected one [T]")
    kept: NDArray[np.float64] = np.where(mask, values.astype(np.float64), 0.0)
    bad = kept.size - int(np.isfinite(kept).sum())
    if bad:
        raise ValueError(
            f"{bad} of {int(mask.sum())} {name} inside the mask are not finite; expected numbers: mask these tokens and"
            " report them"
        )
    return kept


def log_ratios(train: Floats, rollout: Floats, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[T] d = log pi_train - log pi_rollout in float64 nats, 0 outside the mask.

    Raises:
        ValueError: the shapes differ, or a log-prob inside the mask is not finite.
    """
    return masked_values("train log-probs", train, mask) - masked_values("rollout log-probs", rollout, mask)


def token_ratios(d: Floats, mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """[T] e^d, 1 outside the mask; inf where e^d exceeds float64 (d > 709).

    Raises:
        ValueError: the shapes differ, or a d inside the mask is not finite.
    """
    with np.errstate(over="ignore"):
        return np.exp(masked_values("differences", d, mask))


def split_ratios(*, now: Floats, behaviour: Floats, rollout: Floats, mask: NDArray[np.bool_]) -> RatioSplit:
    """Split the total ratio into staleness and engine.

    Args:
        now: [T] nats of the policy that is to be trained.
        behaviour: [T] nats of the trainer's numerics at the version that sampled each token.
        rollout: [T] nats as the engine logged them.
        mask: [T] True where all three are known.

    Raises:
        ValueError: the shapes differ, or a log-prob inside the mask is not finite.

    Source: the decoupled objective of AReaL (arXiv 2505.24298), whose proximal and behaviour policies are pi_now and
    pi_beh.
    """
    logged = masked_values("rollout log-probs", rollout, mask)
    recomputed = masked_values("behaviour log-probs", behaviour, mask)
    current = masked_values("current log-probs", now, mask)
    return RatioSplit(d_total=current - logged, d_stale=current - recomputed, d_engine=recomputed - logged, mask=mask)


def estimate_by_lag(d_total: Floats, lags: NDArray[np.int64], mask: NDArray[np.bool_]) -> LagEstimate:
    """Mean |d_total| by lag with the least-squares line through all tokens (each lag counts as often as it has tokens).

    Args:
        d_total: [T] nats.
        lags: [T] optimizer steps between the sampling and the scoring weights; read inside the mask only.
        mask: [T]

    Raises:
        ValueError: the shapes differ, or inside the mask a d is not finite or a lag is negative.
    """
    if lags.shape != mask.shape:
        raise ValueError(f"lags have shape {lags.shape}, their mask {mask.shape}; expected one [T]")
    sizes, ages = np.abs(masked_values("differences", d_total, mask)[mask]), lags[mask]
    negative = int((ages < 0).sum())
    if negative:
        raise ValueError(
            f"{negative} tokens inside the mask have a negative lag; expected them no newer than the weights that score"
            " them: check the versions"
        )
    found, inverse = np.unique(ages, return_inverse=True)
    counts = np.bincount(inverse, minlength=found.size).astype(np.int64)
    mean_abs = np.bincount(inverse, weights=sizes, minlength=found.size) / counts
    slope, intercept = _line(found.astype(np.float64), mean_abs, counts) if found.size > 1 else (None, None)
    return LagEstimate(lags=found, mean_abs=mean_abs, num_tokens=counts, slope=slope, intercept=intercept)


def _line(x: NDArray[np.float64], y: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[float, float]:
    """(slope, intercept) of least squares weighted by counts; needs two distinct x."""
    weights = counts / counts.sum()
    centre = float(weights @ x)
    leaning = weights * (x - centre)
    slope = float(leaning @ y) / float(leaning @ (x - centre))
    return slope, float(weights @ y) - slope * centre
