"""Probes over given gradient vectors, for tests of the gradient search without a model."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.gradloc.probe.step_terms import Terms
from trainer.gradloc.tree import Segment


class VectorProbe:
    """Leaf i has the gradient `vectors[i]` and weight 1; every measurement is one pass."""

    def __init__(self, vectors: NDArray[np.float32], tau: float, *, non_finite: bool = False) -> None:
        self.vectors, self._tau, self._non_finite = vectors, tau, non_finite
        self.asked: list[Segment] = []

    @classmethod
    def orthogonal(cls, norms: Sequence[float], tau: float) -> "VectorProbe":
        return cls(np.diag(np.array(norms, dtype=np.float32)), tau)

    @property
    def num_leaves(self) -> int:
        return len(self.vectors)

    def cost(self, segment: Segment) -> int:
        return 1

    def norm(self, segment: Segment) -> float:
        self.asked.append(segment)
        with np.errstate(invalid="ignore"):
            gradient = self.vectors[segment.start : segment.end].sum(axis=0)
        return float(np.linalg.norm(gradient.astype(np.float64)))

    def fires(self, norm: float, segment: Segment) -> bool:
        return not math.isfinite(norm) if self._non_finite else norm > self._tau * math.sqrt(segment.size)


class TermsProbe:
    """A `StepProbe` where term i has the gradient `vectors[i]`."""

    def __init__(self, vectors: NDArray[np.float32], eps: float = float(np.finfo(np.float32).eps)) -> None:
        self.vectors, self.eps = vectors, eps
        self._last: tuple[Terms, NDArray[np.float32]] | None = None
        self.passes = 0

    def cost(self, terms: Terms) -> int:
        return int(terms.size > 0)

    def norm(self, terms: Terms) -> float:
        self.passes += self.cost(terms)
        self._last = (terms, self.vectors[terms].sum(axis=0))
        return float(np.linalg.norm(self._last[1].astype(np.float64)))

    def rest_cost(self, terms: Terms) -> int:
        return 0 if self._measured_last(terms) else self.cost(terms)

    def rest(self, terms: Terms) -> float:
        if not self._measured_last(terms):
            self.norm(terms)
        assert self._last is not None
        return float(np.linalg.norm((self.vectors.sum(axis=0) - self._last[1]).astype(np.float64)))

    def _measured_last(self, terms: Terms) -> bool:
        return self._last is not None and np.array_equal(self._last[0], terms)
