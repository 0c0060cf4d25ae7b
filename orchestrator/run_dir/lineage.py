"""Which steps count: a resume takes back every later step of the older epochs."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where each trainer epoch took over."""

    resumed: Mapping[int, int]
    """Trainer epoch -> version from which it went on."""

    def counts(self, epoch: int, step: int) -> bool:
        """Whether a step of an epoch is one of the run's."""
        return all(step <= version for later, version in self.resumed.items() if later > epoch)

    def count(self, epochs: NDArray[np.float64], steps: NDArray[np.float64]) -> NDArray[np.bool_]:
        """The same of many, [n]."""
        kept = np.ones(steps.size, dtype=np.bool_)
        for later, version in self.resumed.items():
            kept &= ~((epochs < later) & (steps > version))
        return kept

    def with_rows(self, epochs: NDArray[np.float64], steps: NDArray[np.float64]) -> "Lineage":
        """Where no event says, an epoch took over before its first row."""
        first = {int(epoch): int(steps[epochs == epoch].min()) - 1 for epoch in np.unique(epochs[np.isfinite(epochs)])}
        return Lineage({**first, **self.resumed})
