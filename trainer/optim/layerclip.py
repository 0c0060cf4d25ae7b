"""LayerClip: each block is clipped by its own history, so one exploding block freezes no other. It knows no tensor.

Source: Huang, Xu, Wang et al., *Stabilizing RLVR via Token-level Gradient Diagnosis and Layerwise Clipping*, 2026;
alpha, beta and eps are not published.
"""

from collections.abc import Sequence

from trainer.config.trainer import LayerClipConfig
from trainer.optim.clipping import BlockClip, ClipState


class LayerClip(BlockClip):
    """scale = min(1, alpha R / (norm + eps)) of each block, where R is a mean over the norms of its past.

    * `lagged`: R is that of the step before, and learns the clipped norm: a spike neither excuses itself nor raises
      later thresholds by more than alpha R. In the first `warmup_steps` steps in which a block has a gradient nothing
      is clipped and R is the plain mean of its norms, then the exponential one. A norm of 0 teaches nothing: it would
      lower R by steps in which the block was not asked, down to a threshold of 0 that no gradient could leave.
    * `paper_ema`: as published: R = beta R + (1 - beta) norm first, then the clip by this R; R starts as the first
      norm. No warm-up. It clips only where norm > alpha beta R / (1 - alpha (1 - beta)), and never if alpha (1 - beta)
      >= 1.
    * `paper_ca`: as published, with R the mean of all norms, this one included. No warm-up.
    """

    kind = "layerclip"

    def __init__(self, names: Sequence[str], config: LayerClipConfig) -> None:
        super().__init__(names)
        self._config = config
        self._seen = [0] * len(self._names)

    def state_dict(self) -> ClipState:
        return {**super().state_dict(), "seen": dict(zip(self._names, self._seen, strict=True))}

    def load_state_dict(self, state: ClipState) -> None:
        super().load_state_dict(state)
        self._seen = [int(state["seen"][name]) for name in self._names]

    def _block(self, block: int, norm: float) -> tuple[float, float | None]:
        return self._lagged(block, norm) if self._config.mode == "lagged" else self._published(block, norm)

    def _lagged(self, block: int, norm: float) -> tuple[float, float | None]:
        reference, seen = self._references[block], self._seen[block]
        threshold = None if reference is None or seen < self._config.warmup_steps else self._config.alpha * reference
        scale = 1.0 if threshold is None else self._scale(threshold, norm)
        if norm > 0:
            learnt = scale * norm
            if reference is None:
                self._references[block] = learnt
            elif threshold is None:
                self._references[block] = reference + (learnt - reference) / (seen + 1)
            else:
                self._references[block] = self._decayed(reference, learnt)
            self._seen[block] = seen + 1
        return scale, threshold

    def _published(self, block: int, norm: float) -> tuple[float, float | None]:
        reference, seen = self._references[block], self._seen[block]
        if reference is None:
            reference = norm
        elif self._config.mode == "paper_ca":
            reference += (norm - reference) / (seen + 1)
        else:
            reference = self._decayed(reference, norm)
        self._references[block], self._seen[block] = reference, seen + 1
        threshold = self._config.alpha * reference
        return self._scale(threshold, norm), threshold

    def _decayed(self, reference: float, norm: float) -> float:
        return self._config.beta * reference + (1.0 - self._config.beta) * norm

    def _scale(self, threshold: float, norm: float) -> float:
        return min(1.0, threshold / (norm + self._config.eps)) if norm > 0 else 1.0
