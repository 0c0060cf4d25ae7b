"""Log-probs at other tokens than their own, asked of the rows that fail."""

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.consistency.dump.shift import LoggedRow, check_places

PROMPT = 4


def rows(count: int, size: int = 12) -> list[LoggedRow]:
    """Rows whose log is their scores."""
    found: list[LoggedRow] = []
    for number in range(count):
        scores = -np.random.default_rng(number).exponential(size=PROMPT + size).astype(np.float32)
        mask = np.arange(scores.size) >= PROMPT
        found.append(LoggedRow(number=number, scores=scores, logged=np.where(mask, scores, np.float32(0)), mask=mask))
    return found


def with_log(row: LoggedRow, logged: NDArray[np.float32]) -> LoggedRow:
    return LoggedRow(number=row.number, scores=row.scores, logged=logged, mask=row.mask)


@pytest.mark.parametrize(
    ("places", "words"),
    [
        (-1, "one place early: entry t is about token t + 1, as in layout next_token"),
        (1, "one place late: entry t is about token t - 1"),
        (-2, "two places early"),
        (2, "two places late"),
        (-PROMPT, "as many places early as the prompt is long"),
    ],
)
def test_a_shift_of_some_rows_is_found_in_them_and_named(places: int, words: str):
    dump = rows(20)
    for number in (3, 13):
        dump[number] = with_log(dump[number], np.roll(dump[number].logged, places))
    found = check_places([dump[3], dump[13]], dump)
    assert set(found) == {3, 13} and all(finding.code == "logprobs_shifted" for finding in found.values())
    assert words in found[3].detail


def test_rows_whose_logs_were_exchanged_are_named_with_the_rows_that_they_belong_to():
    dump = rows(9)
    dump[2], dump[7] = with_log(dump[2], dump[7].logged), with_log(dump[7], dump[2].logged)
    found = check_places([dump[2], dump[7]], dump)
    assert {number: finding.code for number, finding in found.items()} == dict.fromkeys(
        (2, 7), "logprobs_of_another_row"
    )
    assert "those of row 7" in found[2].detail and "those of row 2" in found[7].detail


def test_a_log_that_stands_nowhere_is_none_of_these():
    dump = rows(9)
    dump[2] = with_log(dump[2], -np.random.default_rng(99).exponential(size=dump[2].logged.size).astype(np.float32))
    assert check_places([dump[2]], dump) == {}


def test_too_few_tokens_match_by_chance_and_are_not_named():
    dump = rows(9, size=2)
    dump[2] = with_log(dump[2], np.roll(dump[2].logged, 1))
    assert check_places([dump[2]], dump) == {}
