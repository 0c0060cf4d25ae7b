"""ZClip: the whole gradient is clipped where its norm is an outlier of its own history, by z-score. It knows no tensor.

Source: Kumar, Owen et al., *ZClip: Adaptive Spike Mitigation for LLM Pre-Training*, 2025 (adaptive scaling, threshold
z* = alpha^2 / z).
"""

import math
from collections.abc import Sequence

from trainer.config.trainer import ZClipConfig
from trainer.optim.clipping import ClipDecision, ClipState, global_norm, refuse_bad_norms


class ZClip:
    """One scale for all blocks. With mean and variance of the norms of the past, z = (norm - mean) / (std + eps).

    Where z > alpha, the norm comes down to mean + alpha^2 / z x std: the farther out, the lower. Mean and variance then
    learn the clipped norm. In the first `warmup_steps` steps nothing is clipped, and both are those of the norms so
    far.
    """

    def __init__(self, names: Sequence[str], config: ZClipConfig) -> None:
        self._names, self._config = tuple(names), config
        self._mean, self._variance, self._seen = 0.0, 0.0, 0

    def decide(self, norms: Sequence[float]) -> ClipDecision:
        refuse_bad_norms(self._names, norms)
        norm = global_norm(norms)
        threshold = self._threshold(norm)
        scale = 1.0 if threshold is None else min(1.0, threshold / (norm + self._config.eps))
        # The threshold itself, and not scale x norm: eps would else drift into the history.
        self._learn(norm if threshold is None else threshold)
        return ClipDecision(scales=(scale,) * len(norms), thresholds=(None,) * len(norms))

    def state_dict(self) -> ClipState:
        return {"type": "zclip", "mean": self._mean, "variance": self._variance, "seen": self._seen}

    def load_state_dict(self, state: ClipState) -> None:
        self._mean, self._variance, self._seen = float(state["mean"]), float(state["variance"]), int(state["seen"])

    def _threshold(self, norm: float) -> float | None:
        """The norm to clip to; None where `norm` is no outlier, or nothing is known yet."""
        if self._seen < self._config.warmup_steps:
            return None
        deviation = math.sqrt(self._variance)
        z = (norm - self._mean) / (deviation + self._config.eps)
        return self._mean + self._config.alpha**2 / z * deviation if z > self._config.alpha else None

    def _learn(self, norm: float) -> None:
        beta = self._config.beta
        if self._seen < self._config.warmup_steps:
            # Welford: mean and variance of all norms so far.
            before = self._mean
            self._mean += (norm - before) / (self._seen + 1)
            self._variance += ((norm - before) * (norm - self._mean) - self._variance) / (self._seen + 1)
        else:
            self._mean = beta * self._mean + (1.0 - beta) * norm
            self._variance = beta * self._variance + (1.0 - beta) * (norm - self._mean) ** 2
        self._seen += 1
