"""What the column of log-probs may hold in place of one natural logarithm a token: another unit, sums, means, a filler.
None of it costs a question, since the scores say what each would be. Pure numpy."""

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from trainer.consistency.attribution.inquiry import CLOSED_SHARE, Answer, Inquiry
from trainer.types.evidence import GapCause

EXACT_SHARE = 0.9
"""What is computed from the scores themselves closes all of a gap but the engine's rounding."""
FILLER_TOKENS = 2
"""Tokens with the same log-prob, to the last bit, from where on it is one that somebody filled in."""

_Rows = Callable[[NDArray[np.float64]], NDArray[np.float64]]
_OF_ROWS: tuple[tuple[str, _Rows], ...] = (
    ("logarithms to base 2 (bits), not nats", lambda row: row / math.log(2.0)),
    ("logarithms to base 10, not nats", lambda row: row / math.log(10.0)),
    ("negative log-probs (losses), with the sign turned", lambda row: -row),
    ("probabilities, not their logarithms", np.exp),
    ("running sums: each entry holds those before it too", np.cumsum),
    ("log-probs divided by the number of sampled tokens of their row", lambda row: row / max(1, row.size)),
    ("the mean of its row in every entry", lambda row: np.full(row.size, row.mean() if row.size else 0.0)),
    ("the sum of its row in every entry", lambda row: np.full(row.size, row.sum())),
)
"""(reading, what a row of scores [n] would look like)."""


def ask_units(inquiry: Inquiry) -> bool:
    """Whether the log holds something that is computed from the log-probs of its row."""
    rows = np.split(inquiry.now.values.astype(np.float64), np.cumsum(inquiry.counts)[:-1])
    return inquiry.keep(GapCause.LOGPROB_SEMANTICS, inquiry.best_of(_answers(inquiry, rows), math.inf), EXACT_SHARE)


def _answers(inquiry: Inquiry, rows: list[NDArray[np.float64]]) -> Iterator[Answer]:
    for reading, of_row in _OF_ROWS:
        values = np.concatenate([of_row(row) for row in rows]).astype(np.float32)
        yield inquiry.answer(inquiry.now.options, values, reading)


def ask_filler(inquiry: Inquiry) -> bool:
    """Whether tokens at one end of the rows hold the very same number: it was filled in, and they count as sampled."""
    off = inquiry.now.gaps > inquiry.floor
    numbers, counts = np.unique(inquiry.log[off], return_counts=True)
    if not counts.size or counts.max() < FILLER_TOKENS:
        return False
    filler = numbers[counts.argmax()]
    filled = off & (inquiry.log == filler)
    at_an_end = all(_at_an_end(row) for row in np.split(filled, np.cumsum(inquiry.counts)[:-1]))
    if not at_an_end or filled.all():
        return False
    reading = f"{np.count_nonzero(filled)} sampled tokens at the end of their rows hold {filler:g}, which no model said"
    values = np.where(filled, inquiry.log, inquiry.now.values)
    return inquiry.keep(GapCause.TOKENIZER, inquiry.answer(inquiry.now.options, values, reading), CLOSED_SHARE)


def _at_an_end(filled: NDArray[np.bool_]) -> bool:
    """Whether the tokens of a row are its first ones, or its last ones."""
    places = np.flatnonzero(filled)
    if not places.size:
        return True
    return places[-1] - places[0] + 1 == places.size and (places[0] == 0 or places[-1] == filled.size - 1)
