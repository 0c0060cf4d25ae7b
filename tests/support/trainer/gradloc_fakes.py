"""Probes over given gradient vectors, for tests of the gradient search without a model."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.gradloc.probe.step_terms import Terms
from trainer.gradloc.tree import Segment


class VectorProbe:
    """Leaf i has the gradient `vectors[i]`; every measurement is one pass."""

    eps = float(np.finfo(np.float32).eps)

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self.vectors = vectors
        self._held: tuple[Segment, NDArray[np.float32]] | None = None
        self._last: tuple[Segment, NDArray[np.float32]] | None = None
        self.asked: list[Segment] = []

    @classmethod
    def orthogonal(cls, norms: Sequence[float]) -> "VectorProbe":
        return cls(np.diag(np.array(norms, dtype=np.float32)))

    @property
    def num_leaves(self) -> int:
        return len(self.vectors)

    def cost(self, segment: Segment) -> int:
        return 1

    def norm(self, segment: Segment) -> float:
        self.asked.append(segment)
        with np.errstate(invalid="ignore"):
            gradient = self.vectors[segment.start : segment.end].sum(axis=0)
        self._last = (segment, gradient)
        return float(np.linalg.norm(gradient.astype(np.float64)))

    def holds(self, segment: Segment) -> bool:
        return any(kept is not None and kept[0] == segment for kept in (self._held, self._last))

    def hold(self, segment: Segment) -> None:
        if self._held is not None and self._held[0] == segment:
            return
        if self._last is None or self._last[0] != segment:
            self.norm(segment)
        self._held = self._last

    def remainder(self, sibling: Segment) -> float:
        assert self._held is not None and self._last is not None
        return float(np.linalg.norm((self._held[1] - self._last[1]).astype(np.float64)))

    def descend(self, child: Segment, *, measured: bool) -> None:
        assert self._held is not None and self._last is not None
        self._held = (child, self._last[1] if measured else self._held[1] - self._last[1])
        self._last = None


class TermsProbe:
    """A `StepProbe` where term i has the gradient `vectors[i]`."""

    additive = True

    def __init__(self, vectors: NDArray[np.float32], eps: float = float(np.finfo(np.float32).eps)) -> None:
        self.vectors, self.eps = vectors, eps
        self._held: tuple[Terms, NDArray[np.float32]] | None = None
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

    def holds(self, terms: Terms) -> bool:
        kept = [kept[0] for kept in (self._held, self._last) if kept is not None]
        return terms.size == len(self.vectors) or any(np.array_equal(terms, one) for one in kept)

    def _measured_last(self, terms: Terms) -> bool:
        return self._last is not None and np.array_equal(self._last[0], terms)

    def hold(self, terms: Terms) -> None:
        if self._held is not None and np.array_equal(self._held[0], terms):
            return
        if terms.size == len(self.vectors):
            self._held = (terms, self.vectors.sum(axis=0))
            return
        if self._last is None or not np.array_equal(self._last[0], terms):
            self.norm(terms)
        self._held = self._last

    def remainder(self, sibling: Terms) -> float:
        assert self._held is not None and self._last is not None
        return float(np.linalg.norm((self._held[1] - self._last[1]).astype(np.float64)))

    def descend(self, child: Terms, *, measured: bool) -> None:
        assert self._held is not None and self._last is not None
        self._held = (child, self._last[1] if measured else self._held[1] - self._last[1])
        self._last = None
