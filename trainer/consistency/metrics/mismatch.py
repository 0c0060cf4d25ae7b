"""How far two sets of log-probs of the same tokens are apart, under explicit names. Numpy only.

Everything is computed from log-probs, so on raw ratios: it must never know a clip, a cap or a mask of a correction. The
one number about corrected weights (`ess_fraction_corrected`) takes them as they are. d = log pi_train - log pi_rollout
and rho = e^d; all of it in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.consistency.metrics.ratios import Floats, masked_values


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
    """Of |p_train - p_rollout|, with N - 1; None for one token."""
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
    ess_fraction_corrected: float | None
    """The same of the weights that the loss uses; None where none were given."""
    fraction_beyond_factor_2: float
    """F(2): P(max(rho, 1 / rho) > 2)."""
    fraction_outside_half_to_2: float
    """P(rho outside [0.5, 2])."""
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
    train: Sequence[Floats],
    rollout: Sequence[Floats],
    masks: Sequence[NDArray[np.bool_]],
    *,
    corrected_weights: Sequence[Floats] | None = None,
) -> MismatchMetrics:
    """Compare two sets of log-probs, one array [T] a sequence.

    Args:
        train: nats of the trainer; at which version is the caller's to say.
        rollout: nats as the engine logged them.
        masks: True where a token counts; whatever stands elsewhere is not looked at.
        corrected_weights: the loss's importance weights, token-aligned.

    Raises:
        ValueError: the shapes differ, no token counts, or inside a mask a log-prob or weight is not finite or a weight
            is negative.

    Source: k1, k2, k3 as in http://joschu.net/blog/kl-approx.html.
    """
    ours, theirs, ids = _aligned(train, rollout, masks)
    lengths = np.bincount(ids)
    d = ours - theirs
    sums = np.bincount(ids, weights=d)
    shifts, probabilities = np.abs(d), (np.exp(ours), np.exp(theirs))
    moves = np.abs(probabilities[0] - probabilities[1])
    with np.errstate(over="ignore"):
        k3, chi2 = estimator_k3(d), np.exp(2.0 * d) - 1.0
        chi2_product, chi2_geometric = np.exp(2.0 * sums) - 1.0, np.exp(2.0 * sums / lengths) - 1.0
        train_perplexity, rollout_perplexity = (
            np.exp(-np.bincount(ids, weights=side) / lengths) for side in (ours, theirs)
        )
        return MismatchMetrics(
            num_tokens=d.size,
            num_sequences=lengths.size,
            k1_mean=float(estimator_k1(d).mean()),
            k2_mean=float(estimator_k2(d).mean()),
            k3_mean=float(k3.mean()),
            k3_median=float(np.median(k3)),
            abs_difference_mean=float(shifts.mean()),
            abs_difference_max=float(shifts.max()),
            abs_difference_p50=float(np.quantile(shifts, 0.5)),
            abs_difference_p90=float(np.quantile(shifts, 0.9)),
            abs_difference_p99=float(np.quantile(shifts, 0.99)),
            probability_difference_mean=float(moves.mean()),
            probability_difference_max=float(moves.max()),
            probability_difference_std=float(moves.std(ddof=1)) if d.size > 1 else None,
            probability_pearson=_pearson(*probabilities),
            token_mult_prob_error=float(np.exp(shifts).mean()),
            chi2_token=float(chi2.mean()),
            chi2_token_median=float(np.median(chi2)),
            chi2_sequence_product=float(chi2_product.mean()),
            chi2_sequence_product_median=float(np.median(chi2_product)),
            chi2_sequence_geometric=float(chi2_geometric.mean()),
            chi2_sequence_geometric_median=float(np.median(chi2_geometric)),
            ess_fraction_raw=ess_fraction(np.exp(d - d.max())),
            ess_fraction_corrected=(
                None if corrected_weights is None else ess_fraction(_flat("weights", corrected_weights, masks))
            ),
            fraction_beyond_factor_2=float((shifts > math.log(2.0)).mean()),
            fraction_outside_half_to_2=fraction_outside(d, 0.5, 2.0),
            perplexity_train=float(train_perplexity.mean()),
            perplexity_rollout=float(rollout_perplexity.mean()),
            perplexity_ratio=float(np.exp(-sums / lengths).mean()),
            log_perplexity_difference_mean=float((-sums / lengths).mean()),
            log_perplexity_abs_difference_mean=float(np.abs(sums / lengths).mean()),
        )


def estimator_k1(d: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N] -d, nats."""
    return -d


def estimator_k2(d: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N] d^2 / 2, nats."""
    return d * d / 2.0


def estimator_k3(d: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N] e^d - 1 - d, nats, without cancellation near 0."""
    return np.expm1(d) - d


def ess_fraction(weights: Floats) -> float:
    """(sum w)^2 / (n sum w^2), in [0, 1]; 0 where every weight is 0. The scale of the weights does not matter.

    Raises:
        ValueError: there is no weight, or one is negative or not finite.
    """
    if not weights.size or not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(
            f"an effective sample size needs weights that are finite and not negative, got {weights.size} weights, some"
            " or all of them unfit"
        )
    largest = float(weights.max())
    if largest == 0.0:
        return 0.0
    scaled = weights.astype(np.float64) / largest
    return float(scaled.sum() ** 2 / (scaled.size * (scaled @ scaled)))


def fraction_outside(d: NDArray[np.float64], low: float, high: float) -> float:
    """Share of the N raw ratios e^d outside [low, high], both bounds being ratios.

    Raises:
        ValueError: a bound is not a positive ratio.
    """
    if not 0.0 < low < high:
        raise ValueError(f"got low = {low:g} and high = {high:g}; both are ratios: expected 0 < low < high")
    return float(((d < math.log(low)) | (d > math.log(high))).mean())


def _aligned(
    train: Sequence[Floats], rollout: Sequence[Floats], masks: Sequence[NDArray[np.bool_]]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """[N] log-probs of both sides, and the sequence of each token, numbered over those that have one."""
    lengths = [int(mask.sum()) for mask in masks if mask.any()]
    if not lengths:
        raise ValueError(
            f"no token of {len(masks)} sequences is inside its mask; metrics need at least one: leave such batches out"
        )
    ids = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    return _flat("train log-probs", train, masks), _flat("rollout log-probs", rollout, masks), ids


def _flat(name: str, arrays: Sequence[Floats], masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.float64]:
    """[N] values inside the masks, sequence after sequence."""
    if len(arrays) != len(masks):
        raise ValueError(f"got {name} of {len(arrays)} sequences and masks of {len(masks)}; expected as many of each")
    return np.concatenate([masked_values(name, array, mask)[mask] for array, mask in zip(arrays, masks, strict=True)])


def _pearson(left: NDArray[np.float64], right: NDArray[np.float64]) -> float | None:
    """Correlation, or None where one side is constant."""
    if left.min() == left.max() or right.min() == right.max():
        return None
    left, right = left - left.mean(), right - right.mean()
    return float(left @ right / np.sqrt((left @ left) * (right @ right)))
