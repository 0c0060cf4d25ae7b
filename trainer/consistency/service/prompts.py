"""Whether the policy was shown the ids that its prompt has. Numpy only; it holds no tokenizer, only what one does."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.types.prompts import Prompt
from rollout.types.trajectory import Trajectory
from trainer.consistency.checks.structure import check_same_ids
from trainer.consistency.checks.tokens import ThroughText
from trainer.types.evidence import CheckFinding


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """How this run turns prompts into ids, with a tokenizer of the service's own."""

    read: Callable[[Prompt], NDArray[np.int32]]
    special_ids: frozenset[int]
    through_text: ThroughText | None = None
    """[P] ids to text, without special tokens, and back."""

    def check(self, expected: NDArray[np.int32], trajectory: Trajectory) -> tuple[CheckFinding, ...]:
        """Whether the policy was shown the very ids that its prompt has."""
        given = trajectory.token_ids[: trajectory.version_spans[0].start]
        return check_same_ids(expected, given, self.special_ids, np.zeros(expected.size, dtype=np.bool_))
