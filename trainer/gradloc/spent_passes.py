"""Passes that one kind of trigger has cost lately, so that a run that asks for a search in every step does not pay for
one in every step. Plain Python."""

from collections import deque
from collections.abc import Sequence

WINDOW_STEPS = 100
"""Steps over which passes are counted: a step and those before it."""


class SpentPasses:
    """Step by step; the same on all ranks."""

    def __init__(self) -> None:
        self._steps: deque[int] = deque([0] * (WINDOW_STEPS - 1), maxlen=WINDOW_STEPS - 1)

    @property
    def total(self) -> int:
        """Passes of the steps that count beside the next one."""
        return sum(self._steps)

    def step(self, passes: int = 0) -> None:
        """A step is over, and cost so many."""
        self._steps.append(passes)

    def state(self) -> list[float]:
        return [float(passes) for passes in self._steps]

    def load_state(self, state: Sequence[float]) -> None:
        self._steps.extend(int(passes) for passes in state)
