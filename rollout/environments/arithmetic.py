"""Procedural addition: `12+34=`, answered by the digits of the sum in reverse (`64`). It reads no file and no
tokenizer.

With several turns a prompt carries the later sums in its metadata, under `LATER`, and they are asked one after the
other.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rollout.config import ArithmeticConfig
from rollout.environments.order import PassOrder, mixed_bits
from rollout.errors import UserError
from rollout.types.prompts import Prompt, PromptCursor

LATER = "later_sum"
"""Metadata key of what is asked in a later turn, in order."""
_MOST_DIGITS = 18
_STREAMS = (-1, -2)
"""Streams of the two operands; passes use those from 0."""


class ArithmeticSource:
    """`config.prompts` distinct sums, chosen by the seed; each pass holds the same sums in another order."""

    def __init__(self, config: ArithmeticConfig, seed: int, skip: int = 0) -> None:
        """Choose the sums.

        Args:
            skip: leave out the sums that a source of so many prompts has; what is held out begins behind them.

        Raises:
            UserError: there are fewer sums of so many digits than prompts asked for.
        """
        if config.digits > _MOST_DIGITS:
            raise UserError(f"got environment.digits = {config.digits}; expected at most {_MOST_DIGITS}")
        if config.prompts + skip > 100**config.digits:
            wanted = (
                f"environment.prompts = {config.prompts}"
                if not skip
                else f"environment.prompts = {skip} and evaluation.prompts = {config.prompts}"
            )
            raise UserError(
                f"got {wanted}, but operands of {config.digits} digits make {100**config.digits} sums; lower prompts or"
                " raise digits"
            )
        self._take(
            _distinct_pairs(skip + config.prompts, 10**config.digits, seed)[skip:], config.digits, config.turns, seed
        )

    def _take(self, operands: NDArray[np.int64], digits: int, turns: int, seed: int) -> None:
        self._operands, self._digits, self._turns = operands, digits, turns
        self._order = PassOrder(len(operands), seed, shuffle=True)

    @property
    def size(self) -> int:
        """Prompts in one pass."""
        return self._order.size

    def draw(self, cursor: PromptCursor, count: int) -> tuple[list[Prompt], PromptCursor]:
        """The next `count` prompts from `cursor`, and the cursor behind them."""
        return self._order.draw(cursor, count, self._prompt)

    def _prompt(self, row: int, pass_index: int) -> Prompt:
        (task, answer), *later = (self._sum((row + turn) % self.size) for turn in range(self._turns))
        return Prompt(
            prompt_id=task,
            pass_index=pass_index,
            text=f"{task}=",
            answer=answer + "".join(each for _, each in later),
            metadata=tuple((LATER, f"{each}=") for each, _ in later),
        )

    def _sum(self, row: int) -> tuple[str, str]:
        """What is asked, and its answer."""
        left, right = (int(operand) for operand in self._operands[row])
        return f"{left:0{self._digits}d}+{right:0{self._digits}d}", str(left + right)[::-1]


class EasySums(ArithmeticSource):
    """The 55 sums below ten but those of `held_out`, one turn each, whatever the digits of the operands."""

    def __init__(self, digits: int, seed: int, held_out: Iterable[Prompt] = ()) -> None:
        kept_out = {prompt.prompt_id for prompt in held_out}
        pairs = [
            (left, right)
            for left in range(10)
            for right in range(10 - left)
            if f"{left:0{digits}d}+{right:0{digits}d}" not in kept_out
        ]
        self._take(np.array(pairs, dtype=np.int64), digits, 1, seed)


def _distinct_pairs(count: int, base: int, seed: int) -> NDArray[np.int64]:
    """[count, 2] distinct pairs below `base`, in the order in which the seed's stream first gives them."""
    drawn = 2 * count
    while True:
        indices = np.arange(drawn, dtype=np.uint64)
        pairs = np.stack([mixed_bits(indices, seed, stream) % np.uint64(base) for stream in _STREAMS], axis=1).astype(
            np.int64
        )
        _, first = np.unique(pairs, axis=0, return_index=True)
        if first.size >= count:
            return pairs[np.sort(first)[:count]]
        drawn *= 2
