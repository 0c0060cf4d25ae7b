"""The usual gradient norm of each block, from its own past. Layer 3 of diagnosis; it knows no tensor."""

from collections import deque
from collections.abc import Sequence

import numpy as np

WINDOW_STEPS = 100
"""Steps whose norms count."""
MIN_STEPS = 10
"""Steps before anything is usual."""


class BlockHistory:
    """Medians, so that a spike in the history hides no other."""

    def __init__(self) -> None:
        self._norms: deque[tuple[float, ...]] = deque(maxlen=WINDOW_STEPS)

    def remember(self, norms: Sequence[float]) -> None:
        """[blocks] norms of a step that is applied."""
        self._norms.append(tuple(norms))

    def ratios(self, norms: Sequence[float]) -> tuple[float, ...]:
        """[blocks] each norm over the usual one of its block; empty before enough steps. 0 over 0 is 1: such a block is
        as it always is."""
        if len(self._norms) < MIN_STEPS:
            return ()
        usual = np.median(np.array(self._norms), axis=0)
        return tuple(
            1.0 if norm == own == 0 else float(np.float64(norm) / own) if own > 0 else float("inf")
            for norm, own in zip(norms, usual, strict=True)
        )

    def state(self) -> list[list[float]]:
        return [list(norms) for norms in self._norms]

    def load_state(self, state: Sequence[Sequence[float]]) -> None:
        self._norms.clear()
        self._norms.extend(tuple(norms) for norms in state)
