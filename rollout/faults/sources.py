"""Faults of what is asked: wrappers round a source of training prompts. They know no loop."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from rollout.environments.arithmetic import easy_sums
from rollout.errors import UserError
from rollout.faults.config import FaultsConfig
from rollout.faults.data_config import EasyPromptsFault, TrainEvalOverlapFault
from rollout.faults.draws import drawn
from rollout.types.prompts import Prompt, PromptCursor
from rollout.types.protocols import PromptSource


class OverlappingSource:
    """Implements `PromptSource` over another; some prompts are held-out ones."""

    def __init__(
        self, inner: PromptSource, held_out: Sequence[Prompt], fault: TrainEvalOverlapFault, seed: int
    ) -> None:
        self._inner, self._held_out, self._fault, self._seed = inner, tuple(held_out), fault, seed

    @property
    def size(self) -> int:
        return self._inner.size

    def draw(self, cursor: PromptCursor, count: int) -> tuple[list[Prompt], PromptCursor]:
        """Draw from the inner source and replace some prompts; which ones depends on their ids alone."""
        prompts, behind = self._inner.draw(cursor, count)
        return [self._replaced(prompt) for prompt in prompts], behind

    def _replaced(self, prompt: Prompt) -> Prompt:
        if not drawn(self._fault.rate, self._seed, self._fault.type, prompt.prompt_id):
            return prompt
        number = int.from_bytes(hashlib.blake2b(prompt.prompt_id.encode(), digest_size=8).digest(), "little")
        return replace(self._held_out[number % len(self._held_out)], pass_index=prompt.pass_index)


def plant_source(
    source: PromptSource, faults: FaultsConfig, held_out: Sequence[Prompt], *, digits: int | None, seed: int
) -> PromptSource:
    """Wrap or replace a source of training prompts by the faults that are planted on it; without any, `source` itself.

    Args:
        held_out: prompts of the evaluation.
        digits: digits of an operand, for `easy_prompts`; None: the prompts are no sums.
        seed: the run's, for the order.

    Raises:
        UserError: a fault cannot act on these prompts.
    """
    for fault in faults.plant:
        if isinstance(fault, EasyPromptsFault):
            if digits is None:
                raise UserError('fault easy_prompts makes sums; set environment.type = "arithmetic"')
            source = easy_sums(digits, seed, held_out)
        elif isinstance(fault, TrainEvalOverlapFault):
            if not held_out:
                raise UserError("fault train_eval_overlap needs held-out prompts; set evaluation.every_steps")
            source = OverlappingSource(source, held_out, fault, faults.seed)
    return source
