"""Every token term of a step's loss, on all ranks, as one table. Layer 3 of diagnosis. It knows no gradient and no
model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.types.step import MicroBatch

Terms = NDArray[np.int64]
"""Rising indices into the table of a step's terms."""
NO_TERMS: Terms = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTerms:
    """N terms, ordered by micro-batch, rank, row and position: what belongs together is one run of indices."""

    micro_batch: NDArray[np.int32]
    """[N]"""
    rank: NDArray[np.int32]
    """[N]"""
    row: NDArray[np.int32]
    """[N] row in its micro-batch."""
    position: NDArray[np.int32]
    """[N] position of the token in its row."""
    weight_square: NDArray[np.float64]
    """[N]"""
    trajectory_ids: dict[tuple[int, int], tuple[str, ...]]
    """(micro-batch, rank) -> trajectory of each row."""
    num_micro_batches: int
    """Per rank."""
    world: int
    widest_tokens: int
    """Rows x longest row of the largest micro-batch of any rank."""

    @property
    def all(self) -> Terms:
        return np.arange(self.position.size, dtype=np.int64)

    def of(self, micro_batch: int, rank: int | None = None) -> Terms:
        """The terms of one micro-batch, of all ranks or of one."""
        chosen = self.micro_batch == micro_batch
        return np.flatnonzero(chosen if rank is None else chosen & (self.rank == rank))

    def without(self, terms: Sequence[int]) -> Terms:
        """All terms but some."""
        kept = np.ones(self.position.size, dtype=np.bool_)
        kept[list(terms)] = False
        return np.flatnonzero(kept)

    def squared_weight(self, terms: Terms) -> float:
        return float(self.weight_square[terms].sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankTerms:
    """The same of one rank's micro-batches: what ranks send each other."""

    rows: tuple[NDArray[np.int32], ...]
    positions: tuple[NDArray[np.int32], ...]
    weights: tuple[NDArray[np.float32], ...]
    """[B] of each micro-batch's rows."""
    trajectory_ids: tuple[tuple[str, ...], ...]
    widest_tokens: int


def rank_terms(micro_batches: Sequence[MicroBatch]) -> RankTerms:
    """The terms of this rank's micro-batches."""
    masks = [np.nonzero(micro.loss_mask) for micro in micro_batches]
    return RankTerms(
        rows=tuple(rows.astype(np.int32) for rows, _ in masks),
        positions=tuple(columns.astype(np.int32) for _, columns in masks),
        weights=tuple(micro.token_weights for micro in micro_batches),
        trajectory_ids=tuple(micro.trajectory_ids for micro in micro_batches),
        widest_tokens=max((micro.token_ids.size for micro in micro_batches), default=0),
    )


def step_terms(ranks: Sequence[RankTerms]) -> StepTerms:
    """The table of all ranks' terms, the same on each.

    Raises:
        ValueError: ranks have different numbers of micro-batches, so they cannot run together.
    """
    numbers = sorted({len(rank.rows) for rank in ranks})
    if len(numbers) != 1:
        raise ValueError(
            f"got ranks with {numbers} micro-batches; every rank must have the same number: give the others one filler "
            "row without a loss token"
        )
    parts = [
        (m, r, ranks[r].rows[m], ranks[r].positions[m], ranks[r].weights[m])
        for m in range(numbers[0])
        for r in range(len(ranks))
    ]
    sizes = [rows.size for _, _, rows, _, _ in parts]
    return StepTerms(
        micro_batch=np.repeat(np.array([part[0] for part in parts], dtype=np.int32), sizes),
        rank=np.repeat(np.array([part[1] for part in parts], dtype=np.int32), sizes),
        row=np.concatenate([part[2] for part in parts]),
        position=np.concatenate([part[3] for part in parts]),
        weight_square=np.concatenate([np.square(weights[rows].astype(np.float64)) for _, _, rows, _, weights in parts]),
        trajectory_ids={(m, r): ranks[r].trajectory_ids[m] for m in range(numbers[0]) for r in range(len(ranks))},
        num_micro_batches=numbers[0],
        world=len(ranks),
        widest_tokens=max(rank.widest_tokens for rank in ranks),
    )
