"""How hard each token term pulls at its own log-prob, taken while backward runs: which terms a search looks at first.
Layer 3 of diagnosis.

The gradient of a term is its pull times what its log-prob does to the weights. Terms differ by powers of ten in the
first and little in the second, so the term that makes a spike is nearly always the one that pulls hardest. It is an
order only: a search measures what it reports. It knows no search and no loss.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.model.policy_model import PolicyModel

LIKELY_SHARE = 0.1
"""A term is looked at first if this share of the squared pulls, of it and all that pull less, is its own."""

Pulls = NDArray[np.float32]
"""[N] |d loss / d log-prob| x (1 - probability) of a micro-batch's terms, in their order: the gradient at the logits,
up to a factor between 1 and sqrt 2."""


class TermPulls:
    """One rank's part; silent outside `recording`."""

    def __init__(self, model: PolicyModel) -> None:
        """Hook the log-probs of every forward pass that has a graph."""
        self._seen: list[Tensor] | None = None
        self._recorded: dict[int, list[Tensor]] = {}
        model.register_forward_hook(self._watch)

    @contextmanager
    def recording(self, micro_batch: int) -> Generator[None]:
        """The backward pass of this micro-batch of the step runs inside; a second one in its place counts instead of
        the first."""
        self._seen = []
        try:
            yield
            self._recorded[micro_batch] = self._seen
        finally:
            self._seen = None

    def forget(self) -> None:
        self._recorded.clear()

    def values(self, sizes: Sequence[int]) -> tuple[Pulls, ...] | None:
        """Pulls of the step's first micro-batches, which have so many terms; None where backward did not go once
        through the log-probs of just these."""
        recorded = [self._recorded.get(number, []) for number in range(len(sizes))]
        pulls = tuple(
            np.concatenate([np.zeros(0, dtype=np.float32), *(one.cpu().numpy() for one in seen)]) for seen in recorded
        )
        return pulls if all(pull.size == size for pull, size in zip(pulls, sizes, strict=True)) else None

    def _watch(self, _model: nn.Module, _args: object, output: tuple[Tensor, Tensor]) -> None:
        logprobs = output[0]
        if logprobs.requires_grad:
            logprobs.register_hook(partial(self._see, logprobs.detach()))  # pyright: ignore[reportUnknownMemberType]

    def _see(self, logprobs: Tensor, gradient: Tensor) -> None:
        if self._seen is not None:
            self._seen.append((gradient * torch.expm1(logprobs)).abs().float())


def in_order_of_terms(of_ranks: Sequence[tuple[Pulls, ...]]) -> Pulls:
    """All ranks' pulls in the order of `StepTerms`: by micro-batch, then rank."""
    return np.concatenate([pulls for micro_batch in zip(*of_ranks, strict=True) for pulls in micro_batch])


def likely_terms(pulls: Pulls, most: int) -> NDArray[np.int64]:
    """Terms, the hardest first, each of which pulls for `LIKELY_SHARE` of itself and all after it or more; none where a
    pull is not finite."""
    squares = np.square(pulls.astype(np.float64))
    left = float(squares.sum())
    if not np.isfinite(left) or left == 0:
        return np.zeros(0, dtype=np.int64)
    hardest = np.argsort(-squares, kind="stable")[:most]
    chosen: list[int] = []
    for term in hardest:
        if squares[term] < LIKELY_SHARE * left:
            break
        chosen.append(int(term))
        left -= float(squares[term])
    return np.array(chosen, dtype=np.int64)
