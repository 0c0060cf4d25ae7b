"""LayerClip: each block is clipped by its own history, so one exploding block freezes no other. It knows no tensor.

Source: Huang, Xu, Wang et al., *Stabilizing RLVR via Token-level Gradient Diagnosis and Layerwise Clipping*, 2026;
alpha, beta and eps are not published.
"""

from collections.abc import Sequence
from typing import Literal

from trainer.optim.clipping import ClipDecision, ClipState, references_of, refuse_bad_norms

Mode = Literal["lagged", "lagged_raw", "paper_ema", "paper_ca"]


class LayerClip:
    """scale = min(1, alpha R / (norm + eps)) of each block, where R is a mean over the norms of its past.

    * `lagged`: R is that of the step before, and learns the clipped norm: a spike neither excuses itself nor raises
      later thresholds by more than alpha R. In the first `warmup_steps` steps in which a block has a gradient nothing
      is clipped and R is the plain mean of its norms, then the exponential one. A norm of 0 teaches nothing: it would
      lower R by steps in which the block was not asked, down to a threshold of 0 that no gradient could leave.
    * `lagged_raw`: as `lagged`, but R learns the norm before the clip.
    * `paper_ema`: as published: R = beta R + (1 - beta) norm first, then the clip by this R; R starts as the first
      norm. No warm-up. It clips only where norm > alpha beta R / (1 - alpha (1 - beta)), and never if alpha (1 - beta)
      >= 1.
    * `paper_ca`: as published, with R the mean of all norms, this one included. No warm-up.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        mode: Mode = "lagged",
        alpha: float = 2.0,
        beta: float = 0.99,
        eps: float = 1e-6,
        warmup_steps: int = 20,
    ) -> None:
        self._names, self._mode = tuple(names), mode
        self._alpha, self._beta, self._eps, self._warmup_steps = alpha, beta, eps, warmup_steps
        self._references: list[float | None] = [None] * len(self._names)
        self._seen = [0] * len(self._names)

    def decide(self, norms: Sequence[float]) -> ClipDecision:
        refuse_bad_norms(self._names, norms)
        lagged = self._mode in ("lagged", "lagged_raw")
        decided = [(self._lagged if lagged else self._published)(block, norm) for block, norm in enumerate(norms)]
        return ClipDecision(
            scales=tuple(scale for scale, _ in decided), thresholds=tuple(threshold for _, threshold in decided)
        )

    def state_dict(self) -> ClipState:
        return {
            "type": "layerclip",
            "references": dict(zip(self._names, self._references, strict=True)),
            "seen": dict(zip(self._names, self._seen, strict=True)),
        }

    def load_state_dict(self, state: ClipState) -> None:
        self._references = references_of(state, self._names)
        self._seen = [int(state["seen"][name]) for name in self._names]

    def _lagged(self, block: int, norm: float) -> tuple[float, float | None]:
        reference, seen = self._references[block], self._seen[block]
        threshold = None if reference is None or seen < self._warmup_steps else self._alpha * reference
        scale = 1.0 if threshold is None else self._scale(threshold, norm)
        if norm > 0:
            learnt = norm if self._mode == "lagged_raw" else scale * norm
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
        elif self._mode == "paper_ca":
            reference += (norm - reference) / (seen + 1)
        else:
            reference = self._decayed(reference, norm)
        self._references[block], self._seen[block] = reference, seen + 1
        threshold = self._alpha * reference
        return self._scale(threshold, norm), threshold

    def _decayed(self, reference: float, norm: float) -> float:
        return self._beta * reference + (1.0 - self._beta) * norm

    def _scale(self, threshold: float, norm: float) -> float:
        return min(1.0, threshold / (norm + self._eps)) if norm > 0 else 1.0
