"""Seeded order of tasks. It depends on the seed and the pass alone: no library's random stream, so that a resume
elsewhere finds the same order."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rollout.errors import UserError
from rollout.types.prompts import Prompt, PromptCursor

_MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mixed_bits(indices: NDArray[np.uint64], seed: int, stream: int) -> NDArray[np.uint64]:
    """[n] pseudo-random 64-bit words, one an index: SplitMix64 keyed by `seed` and `stream`.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    key = np.uint64(_scalar_mix(_scalar_mix(seed & _MASK_64) ^ (stream & _MASK_64)))
    return _mix((indices + np.uint64(1)) * np.uint64(_GOLDEN) + key)


def seeded_order(size: int, seed: int, pass_index: int) -> NDArray[np.int64]:
    """[size] a permutation of range(size) for one pass."""
    bits = mixed_bits(np.arange(size, dtype=np.uint64), seed, pass_index)
    return np.argsort(bits, kind="stable").astype(np.int64)


class PassOrder:
    """Implements `PromptSource`: walks a finite set of tasks pass after pass, without end. Keeps the order of the pass
    drawn from last: only speed depends on it."""

    def __init__(self, size: int, seed: int, shuffle: bool, prompt_at: Callable[[int, int], Prompt]) -> None:
        """Take the number of tasks, and (row, pass index) -> prompt."""
        self.size = size
        self._seed, self._shuffle, self._prompt_at = seed, shuffle, prompt_at
        self._cached: tuple[int, NDArray[np.int64]] | None = None

    def draw(self, cursor: PromptCursor, count: int) -> tuple[list[Prompt], PromptCursor]:
        """The next `count` tasks from `cursor`.

        Returns:
            The prompts, and the cursor behind them; at the end of a pass it stands at the start of the next.

        Raises:
            UserError: the cursor lies outside a pass: the prompts are not those it was made with.
        """
        if count < 0:
            raise ValueError(f"got count {count}; expected 0 or more prompts")
        pass_index, index = cursor.pass_index, cursor.index
        if pass_index < 0 or not 0 <= index <= self.size:
            raise UserError(
                f"the run stands at prompt {index} of pass {pass_index}, but a pass has {self.size} prompts; resume "
                "with the prompts that the run started with"
            )
        prompts: list[Prompt] = []
        while len(prompts) < count:
            take = min(count - len(prompts), self.size - index)
            prompts += [self._prompt_at(row, pass_index) for row in self._rows(pass_index, index, take)]
            index += take
            if index == self.size:
                pass_index, index = pass_index + 1, 0
        return prompts, PromptCursor(pass_index=pass_index, index=index)

    def _rows(self, pass_index: int, start: int, count: int) -> list[int]:
        if not self._shuffle:
            return list(range(start, start + count))
        if self._cached is None or self._cached[0] != pass_index:
            self._cached = pass_index, seeded_order(self.size, self._seed, pass_index)
        return [int(row) for row in self._cached[1][start : start + count]]


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _scalar_mix(word: int) -> int:
    return int(_mix(np.array([word], dtype=np.uint64))[0])
