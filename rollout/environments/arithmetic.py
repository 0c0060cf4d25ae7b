"""Procedural addition: `12+34=`, answered by the digits of the sum in reverse (`64`). It reads no file.

With several turns a prompt carries the later sums in its metadata, under `LATER`, and they are asked one after the
other.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rollout.config import ArithmeticConfig, EvaluationConfig
from rollout.environments.fixed_turns import FixedTurnsEnv
from rollout.environments.order import PassOrder, mixed_bits
from rollout.environments.single_turn import SingleTurnEnv, prompt_tokens
from rollout.errors import UserError
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.prompts import Prompt
from rollout.types.protocols import Env, PromptSource

LATER = "later_sum"
"""Metadata key of what is asked in a later turn, in order."""
_MOST_DIGITS = 18
_STREAMS = (-1, -2)
"""Streams of the two operands; passes use those from 0."""


def source(
    config: ArithmeticConfig, seed: int, require_answer: bool, held_out: EvaluationConfig | None
) -> PromptSource:
    """`config.prompts` distinct sums, chosen by the seed; those that are held out come behind them.

    Raises:
        UserError: there are fewer sums of so many digits than prompts asked for.
    """
    digits, total, wanted = config.digits, 100**config.digits, f"environment.prompts = {config.prompts}"
    skip, count = 0, config.prompts
    if held_out:
        skip, count = count, held_out.prompts
        wanted += f" and evaluation.prompts = {count}"
    if digits > _MOST_DIGITS:
        raise UserError(f"got environment.digits = {digits}; expected at most {_MOST_DIGITS}")
    if skip + count > total:
        raise UserError(
            f"got {wanted}, but operands of {digits} digits make {total} sums; lower prompts or raise digits"
        )
    return _sums(_distinct_pairs(skip + count, 10**digits, seed)[skip:], digits, config.turns, seed)


def envs(config: ArithmeticConfig, prompt: Prompt, tokenizer: Tokenizer, count: int) -> tuple[Env, ...]:
    """Environments that ask the sums of `prompt` one after the other."""
    ids = prompt_tokens(prompt, tokenizer, apply_chat_template=False)
    later = [_continued(tokenizer, text) for key, text in prompt.metadata if key == LATER]
    if not later:
        return tuple(SingleTurnEnv(config.type, ids) for _ in range(count))
    return tuple(FixedTurnsEnv(config.type, ids, later) for _ in range(count))


def easy_sums(digits: int, seed: int, kept_out: Iterable[Prompt]) -> PromptSource:
    """The 55 sums below ten but those of `kept_out`, one turn each, whatever the digits of the operands."""
    ids = {prompt.prompt_id for prompt in kept_out}
    pairs = [(left, right) for left in range(10) for right in range(10 - left)]
    wanted = [(left, right) for left, right in pairs if f"{left:0{digits}d}+{right:0{digits}d}" not in ids]
    return _sums(np.array(wanted, dtype=np.int64), digits, 1, seed)


def _sums(operands: NDArray[np.int64], digits: int, turns: int, seed: int) -> PromptSource:
    """The sums of these operands [prompts, 2], in another order in each pass."""

    def asked(row: int) -> tuple[str, str]:
        """What is asked, and its answer."""
        left, right = (int(operand) for operand in operands[row % len(operands)])
        return f"{left:0{digits}d}+{right:0{digits}d}", str(left + right)[::-1]

    def prompt(row: int, pass_index: int) -> Prompt:
        (task, answer), *later = (asked(row + turn) for turn in range(turns))
        return Prompt(
            prompt_id=task,
            pass_index=pass_index,
            text=f"{task}=",
            answer=answer + "".join(each for _, each in later),
            metadata=tuple((LATER, f"{each}=") for each, _ in later),
        )

    return PassOrder(len(operands), seed, shuffle=True, prompt_at=prompt)


def _continued(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    """[n] ids of a text that goes on a conversation: no token begins it anew."""
    ids = tokenizer.encode(text)
    return ids[1:] if ids.size and ids[0] == tokenizer.bos_id else ids


def _distinct_pairs(count: int, base: int, seed: int) -> NDArray[np.int64]:
    """[count, 2] distinct pairs below `base`, in the order in which the seed's stream first gives them."""
    drawn = 2 * count
    while True:
        indices = np.arange(drawn, dtype=np.uint64)
        streams = [mixed_bits(indices, seed, stream) % np.uint64(base) for stream in _STREAMS]
        pairs = np.stack(streams, axis=1).astype(np.int64)
        _, first = np.unique(pairs, axis=0, return_index=True)
        if first.size >= count:
            return pairs[np.sort(first)[:count]]
        drawn *= 2
