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
from collections import deque
from collections.abc import Sequence
from statistics import median

from trainer.config.gradloc import CalibratedTau, GivenTau


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


class UsualNorm:
    """What steps usually have, of a token: |gradient| / sqrt(sum of squared token weights), and the tau that follows
    from it unless tau is given."""

    def __init__(self, config: GivenTau | CalibratedTau) -> None:
        self._config = config
        self._history: deque[float] = deque(maxlen=1 if isinstance(config, GivenTau) else config.window_steps)
        self._before: tuple[float, ...] = ()

    def tau(self) -> float:
        """Norm of one token's gradient, before its weight, from which on it is suspicious; NaN while too little is
        known."""
        if isinstance(self._config, GivenTau):
            return self._config.tau
        enough = min(self._config.warmup_steps, self._config.window_steps)
        usual = median(self._history) if len(self._history) >= enough else 0.0
        return self._config.multiple * usual if usual > 0 else math.nan

    def remember(self, grad_norm: float, weight_square: float) -> None:
        """Steps without a gradient, as of groups whose rewards are all alike, say nothing of what a step with one
        usually has."""
        self._before = tuple(self._history)
        self._learn(grad_norm, weight_square)

    def amend(self, grad_norm: float | None, weight_square: float) -> None:
        """As if the last step had never been, but one with this norm, if any."""
        self.load_state(self._before)
        if grad_norm is not None:
            self._learn(grad_norm, weight_square)

    def state(self) -> list[float]:
        return list(self._history)

    def load_state(self, state: Sequence[float]) -> None:
        self._history.clear()
        self._history.extend(state)

    def _learn(self, grad_norm: float, weight_square: float) -> None:
        if math.isfinite(grad_norm) and grad_norm > 0 and weight_square > 0:
            self._history.append(grad_norm / math.sqrt(weight_square))
