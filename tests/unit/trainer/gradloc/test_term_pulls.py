"""Which terms a search looks at first: those that pull for a large share of what is left."""

import numpy as np
import pytest

from trainer.gradloc.probe.term_pulls import in_order_of_terms, likely_terms


def pulls(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array(values, dtype=np.float32)


def test_one_hard_pull_is_likely_and_the_many_others_are_not():
    found = likely_terms(
        np.concatenate((np.ones(500, dtype=np.float32), pulls(1e4), np.ones(500, dtype=np.float32))), 8
    )
    assert found.tolist() == [500]


def test_a_second_pull_is_likely_once_the_first_is_set_aside():
    many = np.ones(1000, dtype=np.float32)
    many[[7, 3]] = 1e6, 1e3
    assert likely_terms(many, 8).tolist() == [7, 3]
    assert likely_terms(many, 1).tolist() == [7]


@pytest.mark.parametrize(
    "values", [np.ones(1000), np.zeros(5), np.zeros(0), pulls(1.0, float("nan")), pulls(1.0, float("inf"))]
)
def test_no_term_is_likely_where_none_stands_out_or_a_pull_is_not_finite(
    values: np.ndarray[tuple[int], np.dtype[np.float32]],
):
    assert likely_terms(values.astype(np.float32), 8).size == 0


def test_pulls_of_ranks_are_ordered_by_micro_batch_then_rank():
    first, second = (pulls(1, 2), pulls(3)), (pulls(10), pulls(20, 30))
    assert in_order_of_terms([first, second]).tolist() == [1, 2, 10, 3, 20, 30]
