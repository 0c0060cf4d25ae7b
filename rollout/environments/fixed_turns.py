"""Environments whose words are known from the start: after each turn of the policy comes the next of them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class FixedTurnsEnv:
    """Shows its prompt, then gives its replies in order; after the last one the next turn ends the episode."""

    def __init__(self, name: str, ids: NDArray[np.int32], replies: Sequence[NDArray[np.int32]]) -> None:
        self.name, self._ids, self._replies = name, ids, iter(replies)

    def prompt_ids(self) -> NDArray[np.int32]:
        return self._ids

    async def reply(self, sampled_ids: NDArray[np.int32]) -> NDArray[np.int32] | None:
        return next(self._replies, None)
