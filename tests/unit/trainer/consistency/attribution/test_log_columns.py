"""Columns that hold something computed from the log-probs, or nothing: no question to a model is needed."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from support.consistency.attribution_room import AS_LOGGED, LIMITS, DistributionRescorer, sampled_as

from trainer.consistency.attribution.attribution import attribute
from trainer.consistency.attribution.inquiry import AttributionFacts
from trainer.types.evidence import Attribution, GapCause

Row = NDArray[np.float32]


def logged(change: Callable[[Row], Row]) -> tuple[Attribution, DistributionRescorer]:
    rescorer = DistributionRescorer()
    rows = sampled_as(rescorer, AS_LOGGED)
    for one in rows:
        one.rollout_logprobs[one.sampled] = change(one.rollout_logprobs[one.sampled])
    found = attribute(rows, AttributionFacts(), rescorer, LIMITS)
    assert found is not None
    return found, rescorer


@pytest.mark.parametrize(
    ("change", "reading"),
    [
        (lambda row: row / np.log(2), "logarithms to base 2"),
        (lambda row: row / np.log(10), "logarithms to base 10"),
        (lambda row: -row, "negative log-probs"),
        (lambda row: np.exp(row), "probabilities"),
        (lambda row: np.cumsum(row), "running sums"),
        (lambda row: row / row.size, "divided by the number of sampled tokens"),
        (lambda row: np.full_like(row, row.mean()), "the mean of its row"),
        (lambda row: np.full_like(row, row.sum()), "the sum of its row"),
    ],
)
def test_another_unit_is_named_and_costs_no_question(change: Callable[[Row], Row], reading: str):
    found, rescorer = logged(change)
    assert found.first is GapCause.LOGPROB_SEMANTICS and found.explained > 0.999 and reading in found.readings[0]
    assert rescorer.asked == [AS_LOGGED]


def filled(row: Row, number: float, places: slice) -> Row:
    row = row.copy()
    row[places] = number
    return row


@pytest.mark.parametrize("number", [0.0, -9999.0, -1e4])
@pytest.mark.parametrize("places", [slice(None, 5), slice(-5, None)])
def test_a_number_that_was_filled_in_at_an_end_of_the_rows_is_named(number: float, places: slice):
    found, _ = logged(lambda row: filled(row, number, places))
    assert (
        found.first is GapCause.TOKENIZER
        and f"60 sampled tokens at the end of their rows hold {number:g}" in (found.readings[0])
    )


def test_the_same_number_in_the_middle_of_the_rows_is_no_filler():
    found, _ = logged(lambda row: filled(row, -9.0, slice(10, 15)))
    assert found.parts == ()
