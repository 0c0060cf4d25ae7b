"""Mathematical equivalence through the library `math-verify`, imported at first use.

The library's own time limits are signals, which work in a main thread only; they stay off, and the deadline of the
reward worker bounds the work.
"""

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from rollout.types.prompts import Prompt
from rollout.types.trajectory import Reward, Trajectory

if TYPE_CHECKING:
    from sympy import Basic, MatrixBase

_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")


class MathVerify:
    """1 when the completion is mathematically equivalent to the answer, else 0. A completion in which no mathematics is
    found is 0."""

    def __init__(self) -> None:
        # It warns that its time limits are off, once in each module.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def __call__(self, prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
        """Raises ValueError where the reference answer itself cannot be read."""
        from math_verify import verify

        if prompt.answer is None:
            raise ValueError(f"prompt {prompt.prompt_id} has no answer to compare with")
        delimited = any(mark in prompt.answer for mark in _DELIMITERS)
        wanted = _parsed(prompt.answer if delimited else f"\\boxed{{{prompt.answer}}}")
        if not wanted:
            raise ValueError(
                f"math-verify finds no mathematics in the answer {prompt.answer!r} of prompt {prompt.prompt_id}"
            )
        got = _parsed(completion)
        return Reward(total=float(bool(got) and verify(list(wanted), list(got), timeout_seconds=0)))


@lru_cache(maxsize=256)
def _parsed(text: str) -> "tuple[Basic | MatrixBase | str, ...]":
    """What the library extracts; cached, since a group shares its answer and often its completions."""
    from math_verify import parse

    found = cast("list[Basic | MatrixBase | str]", parse(text, parsing_timeout=0))
    return tuple(found)
