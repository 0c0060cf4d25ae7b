"""AdaGC: each block is clipped to a multiple of a running mean of its own clipped norms. It knows no tensor.

Source: Wang et al., *AdaGC: Improving Training Stability for Large Language Model Pretraining*, 2025; published per
tensor, here per block.
"""

import math
from collections.abc import Sequence

from trainer.optim.clipping import ClipDecision, ClipState, global_norm, references_of, refuse_bad_norms


class AdaGC:
    """scale = min(1, lam gamma / norm), then gamma = beta gamma + (1 - beta) scale norm.

    In the first `warmup_steps` steps nothing is clipped here, and gamma is the smallest norm of the block behind the
    global clip that acts then. A norm of 0 teaches nothing: gamma would be 0 for good.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        lam: float = 1.05,
        beta: float = 0.98,
        warmup_steps: int = 100,
        warmup_max_norm: float = math.inf,
    ) -> None:
        """`warmup_max_norm` is the global norm to which others clip the gradient after this clip."""
        self._names = tuple(names)
        self._lam, self._beta, self._warmup_steps, self._warmup_max_norm = lam, beta, warmup_steps, warmup_max_norm
        self._references: list[float | None] = [None] * len(self._names)
        self._seen = 0

    def decide(self, norms: Sequence[float]) -> ClipDecision:
        refuse_bad_norms(self._names, norms)
        whole = global_norm(norms)
        backstop = min(1.0, self._warmup_max_norm / whole) if whole > 0 else 1.0
        decided = [self._block(block, norm, backstop) for block, norm in enumerate(norms)]
        self._seen += 1
        return ClipDecision(
            scales=tuple(scale for scale, _ in decided), thresholds=tuple(threshold for _, threshold in decided)
        )

    def state_dict(self) -> ClipState:
        return {
            "type": "adagc",
            "references": dict(zip(self._names, self._references, strict=True)),
            "seen": self._seen,
        }

    def load_state_dict(self, state: ClipState) -> None:
        self._references = references_of(state, self._names)
        self._seen = int(state["seen"])

    def _block(self, block: int, norm: float, backstop: float) -> tuple[float, float | None]:
        reference = self._references[block]
        if self._seen < self._warmup_steps or reference is None:
            if norm > 0:
                self._references[block] = norm * backstop if reference is None else min(reference, norm * backstop)
            return 1.0, None
        threshold = self._lam * reference
        scale = min(1.0, threshold / norm) if norm > 0 else 1.0
        if norm > 0:
            self._references[block] = self._beta * reference + (1.0 - self._beta) * scale * norm
        return scale, threshold
