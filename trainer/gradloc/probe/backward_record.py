"""What the backward pass of a step shows while it runs, so that a search needs fewer passes: norms of parts and pulls
of terms. Layer 3 of diagnosis."""

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from rollout.errors import UserError
from trainer.gradloc.probe.part_norms import PartNorms
from trainer.gradloc.probe.term_pulls import Pulls, TermPulls
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks


class BackwardRecord:
    """One rank's part; every rank has one and calls it alike."""

    def __init__(self, model: PolicyModel, ranks: Ranks, *, part_norms: bool = True, term_pulls: bool = True) -> None:
        """Watch a sharded model before its first forward pass; each of the two may be left out."""
        self._norms = PartNorms(model, ranks) if part_norms else None
        self._pulls = TermPulls(model) if term_pulls else None
        self._recorded: set[int] = set()

    @contextmanager
    def recording(self, micro_batch: int) -> Generator[None]:
        """The backward pass of this micro-batch of the step runs inside; a second one in its place counts instead of
        the first."""
        with ExitStack() as stack:
            for part in (self._norms, self._pulls):
                if part is not None:
                    stack.enter_context(part.recording(micro_batch))
            yield
            self._recorded.add(micro_batch)

    @contextmanager
    def of_step(self, num_micro_batches: int) -> Generator[None]:
        """What was recorded is that of a step with M micro-batches, and is forgotten afterwards.

        Raises:
            UserError: one of them was not recorded.
        """
        missing = sorted(set(range(num_micro_batches)) - self._recorded)
        if missing:
            raise UserError(
                f"got a record without micro-batch {missing[0]} of {num_micro_batches}; run the backward pass of every "
                "micro-batch of the step inside `with record.recording(number):`, or hand over no record"
            )
        try:
            yield
        finally:
            self._recorded.clear()
            for part in (self._norms, self._pulls):
                if part is not None:
                    part.forget()

    def part_norms(self, num_micro_batches: int) -> NDArray[np.float64] | None:
        return None if self._norms is None else self._norms.values(num_micro_batches)

    def term_pulls(self, sizes: Sequence[int]) -> tuple[Pulls, ...] | None:
        """As `TermPulls.values`; None where they are left out."""
        return None if self._pulls is None else self._pulls.values(sizes)
