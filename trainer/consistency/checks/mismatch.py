"""How far two sets of log-probs of the same tokens are apart, under explicit names. Numpy only.

It owns the sign, d = log pi_train - log pi_rollout, and the rule that a position outside the mask is gone before
anything is subtracted or exponentiated. Everything is computed from log-probs in float64, so on raw ratios rho = e^d:
it must never know a clip, a cap or a mask of a correction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
"""Log-probs in nats as they come: float32, or float64 in tests."""
TAIL_NATS = math.log(2.0)
"""|d| of a token whose ratio is outside [1/2, 2]: the tail, whose share is F(2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchMetrics:
    """Over the N tokens inside the masks, and over the S sequences that have at least one. A mean is inf where a ratio
    exceeds float64."""

    num_tokens: int
    num_sequences: int
    k1_mean: float
    """-d, nats; unbiased for KL(rollout || train), and may be negative."""
    k2_mean: float
    """d^2 / 2, nats."""
    k3_mean: float
    """e^d - 1 - d, nats; unbiased for KL(rollout || train), never negative."""
    k3_median: float
    """The mean of k3 follows a single spike, this does not."""
    abs_difference_mean: float
    """|d|, nats."""
    abs_difference_max: float
    abs_difference_p50: float
    abs_difference_p90: float
    abs_difference_p99: float
    probability_difference_mean: float
    """|p_train - p_rollout|."""
    probability_difference_max: float
    probability_difference_std: float | None
    """Standard deviation of |p_train - p_rollout|, with N - 1; None for one token."""
    probability_pearson: float | None
    """Correlation of the probabilities; looks healthy when the mismatch is not. None where one side is constant."""
    token_mult_prob_error: float
    """Mean e^|d|."""
    chi2_token: float
    """Mean rho^2 - 1 over tokens."""
    chi2_token_median: float
    """Median rho^2 - 1 over tokens."""
    chi2_sequence_product: float
    """Mean (product of the sequence's rho)^2 - 1; grows with length."""
    chi2_sequence_product_median: float
    chi2_sequence_geometric: float
    """Mean (geometric mean of the sequence's rho)^2 - 1."""
    chi2_sequence_geometric_median: float
    ess_fraction_raw: float
    """Effective sample size of the ratios as a fraction of N."""
    fraction_beyond_factor_2: float
    """F(2): P(max(rho, 1 / rho) > 2)."""
    fraction_outside_half_to_2: float
    """P(rho outside [0.5, 2]): the same number by another name."""
    perplexity_train: float
    """Mean over sequences of e^(-mean log pi_train)."""
    perplexity_rollout: float
    """Mean over sequences of e^(-mean log pi_rollout)."""
    perplexity_ratio: float
    """Mean over sequences of train perplexity / rollout perplexity."""
    log_perplexity_difference_mean: float
    """Mean over sequences of log train perplexity - log rollout perplexity, nats."""
    log_perplexity_abs_difference_mean: float
    """The same of its absolute value, nats."""


def mismatch_metrics(
    train: Sequence[Floats], rollout: Sequence[Floats], masks: Sequence[NDArray[np.bool_]]
) -> MismatchMetrics:
    """Compare two sets of log-probs, one array [T] a sequence.

    Args:
        train: nats of the trainer; at which version is the caller's to say.
        rollout: nats as the engine logged them.
        masks: True where a token counts; whatever stands elsewhere is not looked at.

    Raises:
        ValueError: the shapes differ, no token counts, or a log-prob inside a mask is not finite.

    Source: k1, k2, k3 as in http://joschu.net/blog/kl-approx.html.
    """
    ours, theirs = _finite("train log-probs", train, masks), _finite("rollout log-probs", rollout, masks)
    lengths = np.array([mask.sum() for mask in masks if mask.any()])
    ids = np.repeat(np.arange(lengths.size), lengths)
    d, sums = ours - theirs, np.bincount(ids, weights=ours - theirs)
    shifts, moves = np.abs(d), np.abs(np.exp(ours) - np.exp(theirs))
    p50, p90, p99 = np.quantile(shifts, (0.5, 0.9, 0.99)).tolist()
    beyond = float((shifts > TAIL_NATS).mean())
    with np.errstate(over="ignore"):
        k3, chi2 = estimator_k3(d), np.expm1(2.0 * d)
        products, geometric = np.expm1(2.0 * sums), np.expm1(2.0 * sums / lengths)
        return MismatchMetrics(
            num_tokens=d.size,
            num_sequences=lengths.size,
            k1_mean=float(-d.mean()),
            k2_mean=float((d * d).mean() / 2.0),
            k3_mean=float(k3.mean()),
            k3_median=float(np.median(k3)),
            abs_difference_mean=float(shifts.mean()),
            abs_difference_max=float(shifts.max()),
            abs_difference_p50=p50,
            abs_difference_p90=p90,
            abs_difference_p99=p99,
            probability_difference_mean=float(moves.mean()),
            probability_difference_max=float(moves.max()),
            probability_difference_std=float(moves.std(ddof=1)) if d.size > 1 else None,
            probability_pearson=_pearson(np.exp(ours), np.exp(theirs)),
            token_mult_prob_error=float(np.exp(shifts).mean()),
            chi2_token=float(chi2.mean()),
            chi2_token_median=float(np.median(chi2)),
            chi2_sequence_product=float(products.mean()),
            chi2_sequence_product_median=float(np.median(products)),
            chi2_sequence_geometric=float(geometric.mean()),
            chi2_sequence_geometric_median=float(np.median(geometric)),
            ess_fraction_raw=ess_fraction(d),
            fraction_beyond_factor_2=beyond,
            fraction_outside_half_to_2=beyond,
            perplexity_train=float(np.exp(-np.bincount(ids, weights=ours) / lengths).mean()),
            perplexity_rollout=float(np.exp(-np.bincount(ids, weights=theirs) / lengths).mean()),
            perplexity_ratio=float(np.exp(-sums / lengths).mean()),
            log_perplexity_difference_mean=float((-sums / lengths).mean()),
            log_perplexity_abs_difference_mean=float(np.abs(sums / lengths).mean()),
        )


def estimator_k3(d: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N] e^d - 1 - d, nats, without cancellation near 0; infinite where d is."""
    return np.where(np.isfinite(d), np.expm1(d) - d, np.inf)


def ess_fraction(d: NDArray[np.float64]) -> float:
    """(sum w)^2 / (n sum w^2) of the weights w = e^d, in [0, 1]. The largest exponent is taken out first, since the
    fraction does not depend on it."""
    top = float(d.max())
    if math.isinf(top):
        return 0.0
    weights = np.exp(d - top)
    return float(weights.sum() ** 2 / (d.size * (weights @ weights)))


def inside(name: str, arrays: Sequence[Floats], masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.float64]:
    """[N] values inside the masks, sequence after sequence.

    Args:
        name: what they are, for the message.

    Raises:
        ValueError: the shapes differ.
    """
    shapes, expected = [array.shape for array in arrays], [mask.shape for mask in masks]
    if shapes != expected:
        raise ValueError(f"got {name} of shapes {shapes} under masks {expected}; expected one [T] a sequence in both")
    return np.concatenate(
        [np.zeros(0), *(array[mask].astype(np.float64) for array, mask in zip(arrays, masks, strict=True))]
    )


def _finite(name: str, arrays: Sequence[Floats], masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.float64]:
    values = inside(name, arrays, masks)
    if not values.size:
        raise ValueError(
            f"no token of {len(masks)} sequences is inside its mask; metrics need at least one: leave such batches out"
        )
    bad = values.size - int(np.isfinite(values).sum())
    if bad:
        raise ValueError(
            f"{bad} of {values.size} {name} inside the mask are not finite; expected numbers: mask these tokens and "
            "report them"
        )
    return values


def _pearson(left: NDArray[np.float64], right: NDArray[np.float64]) -> float | None:
    """Correlation, or None where one side is constant."""
    if left.min() == left.max() or right.min() == right.max():
        return None
    left, right = left - left.mean(), right - right.mean()
    return float(left @ right / np.sqrt((left @ left) * (right @ right)))
