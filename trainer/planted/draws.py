"""Which token terms of a step a planted fault hits: a seeded draw, the same on all ranks. Numpy only; it knows no model
and no loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rollout.faults.gradient_config import NanTokenFault, RatioSpikeFault, TermFault, TwoSpikesFault
from trainer.types.step import MicroBatch, StepBatches

LEAST_SHARE = 0.5
"""A term that pulls less than this share of the step's mean pull is weak, and where the policy is sure of most tokens a
factor makes no spike of a weak one."""

StepPulls = Sequence[Sequence[NDArray[np.float64]]]
"""[ranks][micro-batches][B, T] how hard the term of each token pulls at the token's own logit; 0 where it has no
gradient, or is not in the loss."""
StepTokens = Sequence[Sequence[NDArray[np.bool_]]]
"""[ranks][micro-batches][B, T] some tokens of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTerm:
    """One token term of a step."""

    rank: int
    micro_batch: int
    row: int
    position: int
    """Place of the token in its row."""


def generator(seed: int, kind: str, index: int, version: int) -> np.random.Generator:
    """The draws of fault `index` of the config in the step that produces `version`."""
    return np.random.default_rng([seed, crc32(kind.encode()), index, version])


def candidates(fault: TermFault, step: StepBatches, pulls: StepPulls) -> StepTokens:
    """The loss tokens on whose terms `fault` shows.

    Args:
        pulls: as the terms pull when `fault` has hit them, its factor left out; `nan_token` needs none, since a term
            without a gradient has a value too.
    """
    if isinstance(fault, NanTokenFault):
        return [[micro.loss_mask for micro in micro_batches] for micro_batches in step]
    terms = sum(int(np.count_nonzero(micro.loss_mask)) for micro_batches in step for micro in micro_batches)
    least = LEAST_SHARE * sum(float(pull.sum()) for of_rank in pulls for pull in of_rank) / max(1, terms)

    def of_micro_batch(micro: MicroBatch, pull: NDArray[np.float64]) -> NDArray[np.bool_]:
        strong = micro.loss_mask & (pull > 0) & (pull >= least)
        # Where the advantage is positive, a ratio that is too high is clipped.
        return strong & (micro.advantages < 0) if isinstance(fault, RatioSpikeFault) else strong

    return [[of_micro_batch(*pair) for pair in zip(*of_rank, strict=True)] for of_rank in zip(step, pulls, strict=True)]


def draw_terms(
    fault: TermFault, step: StepBatches, tokens: StepTokens, rng: np.random.Generator
) -> tuple[DrawnTerm, ...]:
    """The terms that `fault` hits, of `tokens`; empty where those are too few.

    Every token of the step has a lot, whatever micro-batch it stands in, and the least lot is drawn: so a single term
    is the same on any number of ranks.
    """
    lots = _lots(step, rng)
    least: dict[tuple[int, int], tuple[float, DrawnTerm]] = {}
    for rank, of_rank in enumerate(tokens):
        for number, allowed in enumerate(of_rank):
            if allowed.any():
                of_part = np.where(allowed, lots[rank][number], np.inf)
                row, position = (int(place) for place in np.unravel_index(int(of_part.argmin()), of_part.shape))
                least[rank, number] = (
                    float(of_part[row, position]),
                    DrawnTerm(rank=rank, micro_batch=number, row=row, position=position),
                )
    parts = sorted(least, key=lambda part: least[part][0])
    if isinstance(fault, TwoSpikesFault):
        pairs = _pairs(parts)
        return tuple(least[part][1] for part in pairs[0]) if pairs else ()
    return tuple(least[part][1] for part in parts[:1])


def _lots(step: StepBatches, rng: np.random.Generator) -> list[list[NDArray[np.float64]]]:
    """[ranks][micro-batches][B, T] between 0 and 1, drawn by the order of the trajectories' ids, which packing leaves
    as it is."""
    rows = [
        (trajectory_id, rank, number, row)
        for rank, micro_batches in enumerate(step)
        for number, micro in enumerate(micro_batches)
        for row, trajectory_id in enumerate(micro.trajectory_ids)
    ]
    lots = [[np.ones(micro.token_ids.shape) for micro in micro_batches] for micro_batches in step]
    for _, rank, number, row in sorted(rows):
        length = step[rank][number].lengths[row]
        lots[rank][number][row, :length] = rng.random(length)
    return lots


def _pairs(parts: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of (rank, micro-batch): of those that differ in both, else in the rank, else in the micro-batch."""
    every = [(first, second) for place, second in enumerate(parts) for first in parts[:place]]
    other_rank = [pair for pair in every if pair[0][0] != pair[1][0]]
    in_both = [pair for pair in other_rank if pair[0][1] != pair[1][1]]
    return in_both or other_rank or every
