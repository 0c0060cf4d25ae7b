"""How busy a replica is: samples in flight, seconds with at least one, tokens answered. It knows no engine."""

from collections.abc import Callable

from rollout.types.protocols import EngineLoad


class Usage:
    """Counts, on a clock of seconds that never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._running = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0
        self._tokens = 0

    def began(self, num_samples: int) -> None:
        """Samples were accepted."""
        if not self._running:
            self._busy_since_s = self._clock()
        self._running += num_samples

    def ended(self, num_samples: int) -> None:
        """As many samples were answered, failed or given up."""
        self._running -= num_samples
        if not self._running:
            self._busy_s += self._clock() - self._busy_since_s

    def generated(self, num_tokens: int) -> None:
        self._tokens += num_tokens

    def load(self) -> EngineLoad:
        since_s = self._clock() - self._busy_since_s if self._running else 0.0
        return EngineLoad(running=self._running, busy_s=self._busy_s + since_s, generated_tokens=self._tokens)
