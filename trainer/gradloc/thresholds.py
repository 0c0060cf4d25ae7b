"""From which gradient norm on a set of token terms is suspicious. Layer 3 of diagnosis (numerical updates). Plain
Python; it knows no gradient.

Two forms exist. Published: each level is re-normalised by its own number of tokens, so the norm is that of a *mean*
over the set's n tokens, and the threshold is tau / sqrt(n). Ours: the loss is a sum of weighted token terms with fixed
denominators, so gradients are additive over any set S, the norm is that of a *sum*, and the threshold is T(S) = tau
sqrt(sum of w_i^2 over S). With w_i = 1/N the one is the other times n/N.

Source: Huang, Xu, Wang et al., Stabilizing RLVR via Token-level Gradient Diagnosis and Layerwise Clipping, Tencent
Hunyuan, 2026.
"""

import math


def set_threshold(tau: float, weight_square: float) -> float:
    """T(S) = tau sqrt(sum w_i^2), for the norm of the sum over S.

    Args:
        tau: norm of one token's gradient, before its weight.
        weight_square: sum of the squared weights of the terms of S.

    Raises:
        ValueError: tau or the sum is not a number that can bound anything.
    """
    if not (tau > 0 and math.isfinite(tau)):
        raise ValueError(
            f"got tau = {tau}; expected a positive number: set `tau` to the norm from which on one token's gradient is "
            "suspicious"
        )
    if not weight_square >= 0:
        raise ValueError(f"got a sum of squared weights of {weight_square}; expected 0 or more")
    return tau * math.sqrt(weight_square)
