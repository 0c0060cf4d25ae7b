"""Samples become equal numbers of micro-batches for every rank: rows of like length together, within a token budget.
Deterministic; numpy only."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.types.step import MicroBatch, TrainingSample

_FILLER_TOKENS = 2
"""The shortest row with a position that predicts another."""


def pack(samples: Sequence[TrainingSample], ranks: int, micro_batch_tokens: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Micro-batches of each rank, the same number for all, with rows x longest row <= `micro_batch_tokens` (one longer
    row makes its own).

    Samples are sorted by length and dealt out in a snake, so ranks get like work; a rank that needs fewer micro-batches
    splits its largest, and only when each of its rows stands alone does it get a micro-batch of one filler row.
    """
    order = sorted(range(len(samples)), key=lambda index: (-samples[index].token_ids.size, index))
    shares: list[list[TrainingSample]] = [[] for _ in range(ranks)]
    for place, index in enumerate(order):
        turn, seat = divmod(place, ranks)
        shares[seat if turn % 2 == 0 else ranks - 1 - seat].append(samples[index])
    rows = [_greedy(share, micro_batch_tokens) for share in shares]
    number = max(1, *(len(batches) for batches in rows))
    return tuple(tuple(micro_batch_of(batch) for batch in _split_to(batches, number)) for batches in rows)


def _greedy(share: Sequence[TrainingSample], budget: int) -> list[list[TrainingSample]]:
    """Cut a list that is sorted by falling length into runs of at most `budget` padded tokens."""
    batches: list[list[TrainingSample]] = []
    for sample in share:
        if batches and (len(batches[-1]) + 1) * batches[-1][0].token_ids.size <= budget:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


def _split_to(batches: list[list[TrainingSample]], number: int) -> list[list[TrainingSample]]:
    """The same rows in exactly `number` lists; empty lists stand for fillers."""
    result = list(batches)
    while len(result) < number:
        largest = max(range(len(result)), key=lambda index: len(result[index]), default=-1)
        if largest < 0 or len(result[largest]) < 2:
            result.append([])
            continue
        rows = result[largest]
        half = len(rows) // 2
        result[largest : largest + 1] = [rows[:half], rows[half:]]
    return result


def micro_batch_of(rows: Sequence[TrainingSample]) -> MicroBatch:
    """One micro-batch of these rows; of none, a filler row without a loss token."""
    width = max((row.token_ids.size for row in rows), default=_FILLER_TOKENS)
    return MicroBatch(
        token_ids=_padded([row.token_ids for row in rows], width, np.int64),
        loss_mask=_padded([row.loss_mask for row in rows], width, np.bool_),
        old_logprobs=_padded([row.old_logprobs for row in rows], width, np.float32),
        rollout_logprobs=_padded([row.rollout_logprobs for row in rows], width, np.float32),
        advantages=_padded([row.advantages for row in rows], width, np.float32),
        token_weights=np.array([row.token_weight for row in rows] or [0], dtype=np.float32),
        trajectory_ids=tuple(row.trajectory_id for row in rows) or ("",),
        lengths=tuple(row.token_ids.size for row in rows) or (0,),
        routing=tuple(row.routing for row in rows) or (None,),
        truncations=tuple(row.truncation for row in rows) if any(row.truncation is not None for row in rows) else (),
    )


def _padded(rows: Sequence[NDArray[Any]], width: int, dtype: type[np.generic]) -> NDArray[Any]:
    """[B, width] rows of different lengths with zeros behind them; one row of zeros for none."""
    result = np.zeros((max(1, len(rows)), width), dtype=dtype)
    for index, row in enumerate(rows):
        result[index, : row.size] = row
    return result
