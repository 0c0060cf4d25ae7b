"""Which token terms of a step a planted fault hits: a seeded draw, the same on all ranks. Numpy only; it knows no model and no loss."""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from rollout.faults.gradient_config import NanTokenFault, RatioSpikeFault, TermFault, TwoSpikesFault
from trainer.types import MicroBatch

LEAST_SURPRISE_NATS = 0.1
"""A token that the policy was next to sure of has next to no gradient, and no factor makes a spike of it."""

StepBatches = Sequence[Sequence[MicroBatch]]
"""[ranks][micro-batches] of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTerm:
    """One token term of a step."""

    rank: int
    micro_batch: int
    row: int
    position: int
    """Of the token in its row."""


def generator(seed: int, kind: str, index: int, version: int) -> np.random.Generator:
    """The draws of fault `index` of the config in the step that produces `version`."""
    return np.random.default_rng([seed, crc32(kind.encode()), index, version])


def draw_terms(fault: TermFault, step: StepBatches, rng: np.random.Generator) -> tuple[DrawnTerm, ...]:
    """The terms that `fault` hits; empty where the step has none of the kind that it needs."""
    there = {
        (rank, number): np.argwhere(_eligible(fault, micro)) for rank, micro_batches in enumerate(step) for number, micro in enumerate(micro_batches)
    }
    parts = [part for part, places in there.items() if len(places)]
    if isinstance(fault, TwoSpikesFault):
        pairs = _pairs(parts)
        return tuple(_draw(part, there[part], rng) for part in pairs[int(rng.integers(len(pairs)))]) if pairs else ()
    if not parts:
        return ()
    sizes = np.array([len(there[part]) for part in parts])
    part = parts[int(rng.choice(len(parts), p=sizes / sizes.sum()))]
    return (_draw(part, there[part], rng),)


def _pairs(parts: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of (rank, micro-batch): of those that differ in both, else in the rank, else in the micro-batch."""
    every = [(first, second) for place, first in enumerate(parts) for second in parts[place + 1 :]]
    other_rank = [pair for pair in every if pair[0][0] != pair[1][0]]
    in_both = [pair for pair in other_rank if pair[0][1] != pair[1][1]]
    return in_both or other_rank or every


def _draw(part: tuple[int, int], places: NDArray[np.int64], rng: np.random.Generator) -> DrawnTerm:
    row, position = places[int(rng.integers(len(places)))].tolist()
    return DrawnTerm(rank=part[0], micro_batch=part[1], row=row, position=position)


def _eligible(fault: TermFault, micro: MicroBatch) -> NDArray[np.bool_]:
    """[B, T] terms on which the fault shows."""
    if isinstance(fault, NanTokenFault):
        return micro.loss_mask
    # A ratio that is too high is clipped where the advantage is positive, and then has no gradient.
    moved = micro.advantages < 0 if isinstance(fault, RatioSpikeFault) else micro.advantages != 0
    return micro.loss_mask & moved[:, None] & (micro.rollout_logprobs < -LEAST_SURPRISE_NATS)
