"""AdaGC: each block is clipped to a multiple of a running mean of its own clipped norms. It knows no tensor.

Source: Wang et al., *AdaGC: Improving Training Stability for Large Language Model Pretraining*, 2025; published per
tensor, here per block.
"""

from collections.abc import Sequence

from trainer.config.trainer import AdaGCConfig
from trainer.optim.clipping import BlockClip, ClipDecision, ClipState, global_norm


class AdaGC(BlockClip):
    """scale = min(1, lam gamma / norm), then gamma = beta gamma + (1 - beta) scale norm.

    In the first `warmup_steps` steps nothing is clipped here, and gamma is the smallest norm of the block behind the
    global clip that acts then. A norm of 0 teaches nothing: gamma would be 0 for good.
    """

    kind = "adagc"

    def __init__(self, names: Sequence[str], config: AdaGCConfig, warmup_max_norm: float) -> None:
        """`warmup_max_norm` is the global norm to which others clip the gradient after this clip."""
        super().__init__(names)
        self._config, self._warmup_max_norm = config, warmup_max_norm
        self._seen = 0
        self._backstop = 1.0

    def decide(self, norms: Sequence[float]) -> ClipDecision:
        whole = global_norm(norms)
        self._backstop = min(1.0, self._warmup_max_norm / whole) if whole > 0 else 1.0
        decision = super().decide(norms)
        self._seen += 1
        return decision

    def state_dict(self) -> ClipState:
        return {**super().state_dict(), "seen": self._seen}

    def load_state_dict(self, state: ClipState) -> None:
        super().load_state_dict(state)
        self._seen = int(state["seen"])

    def _block(self, block: int, norm: float) -> tuple[float, float | None]:
        reference = self._references[block]
        if self._seen < self._config.warmup_steps or reference is None:
            if norm > 0:
                behind = norm * self._backstop
                self._references[block] = behind if reference is None else min(reference, behind)
            return 1.0, None
        threshold, beta = self._config.lam * reference, self._config.beta
        scale = min(1.0, threshold / norm) if norm > 0 else 1.0
        if norm > 0:
            self._references[block] = beta * reference + (1.0 - beta) * scale * norm
        return scale, threshold
