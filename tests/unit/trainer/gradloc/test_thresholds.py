"""Thresholds of the gradient search: the published levels, and their one conversion to sums."""

import json
import math
from typing import Any

import pytest
from support.paths import GOLDEN_FOLDER

from trainer.gradloc.thresholds import (
    published_micro_batch_threshold,
    published_passes,
    published_rank_threshold,
    published_threshold,
    set_threshold,
    sum_threshold,
)

GOLDEN: dict[str, Any] = json.loads((GOLDEN_FOLDER / "golden_vectors.json").read_text())
V6 = GOLDEN["V6_thresholds"]
TAU, TOKENS, MICRO_BATCHES, WORLD = V6["tau"], V6["N"], V6["M"], V6["W"]


def test_published_thresholds_are_those_of_the_golden_vectors():
    blog = V6["blog"]
    assert published_threshold(TAU, TOKENS) == pytest.approx(blog["global_"], rel=1e-9)
    assert published_micro_batch_threshold(TAU, TOKENS, MICRO_BATCHES) == pytest.approx(blog["mb"], rel=1e-9)
    for ranks, expected in blog["rank"].items():
        assert published_rank_threshold(TAU, TOKENS, MICRO_BATCHES, WORLD, int(ranks)) == pytest.approx(
            expected, rel=1e-9
        )
    for tokens, expected in blog["seg"].items():
        assert published_threshold(TAU, int(tokens)) == pytest.approx(expected, rel=1e-9)
    assert published_threshold(GOLDEN["V6_readme_cfg"]["tau"], 512 * 4000) == pytest.approx(
        GOLDEN["V6_readme_cfg"]["trigger_blog"], rel=1e-9
    )


def test_the_published_cost_is_that_of_the_golden_vectors():
    cost = V6["cost"]
    assert published_passes(cost["M"], WORLD, 2 ** int(cost["log2L"])) == cost["total"]


@pytest.mark.parametrize("tokens", [1, 2, 1024, TOKENS // MICRO_BATCHES, TOKENS])
def test_a_threshold_on_a_sum_is_the_published_one_converted(tokens: int):
    ours = set_threshold(TAU, tokens * (1 / TOKENS) ** 2)
    assert ours == pytest.approx(sum_threshold(published_threshold(TAU, tokens), tokens, TOKENS), rel=1e-12)


def test_a_threshold_follows_the_weights_and_not_their_number():
    weights = (0.5, 0.25, 0.25)
    assert set_threshold(2.0, sum(w * w for w in weights)) == pytest.approx(2.0 * math.sqrt(0.375))


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan, math.inf])
def test_a_tau_that_bounds_nothing_is_refused_with_the_cure(tau: float):
    with pytest.raises(ValueError, match="set `tau`"):
        set_threshold(tau, 1.0)


def test_the_least_visible_spike_grows_as_the_golden_vector_says():
    """Theorem 1: among N tokens in D dimensions a token sigma times as large as the others shows where sigma^2 - 1 >=
    c(eps) N / sqrt(D).

    The vectors give the right-hand side and not the constant; c(0.01) is taken from the first of them and held against
    the second.
    """
    first = GOLDEN["V8_theorem1"]
    assert first["N_over_sqrtD"] == first["N"] / math.sqrt(first["D"])
    constant = first["rhs"] / first["N_over_sqrtD"]
    for case in (first, first["alt"]):
        assert case["rhs"] == pytest.approx(constant * case["N"] / math.sqrt(case["D"]), rel=1e-9)
        assert case["sigma_min"] == pytest.approx(math.sqrt(1 + case["rhs"]), rel=1e-9)
    assert first["sigma25_lhs"] == 25**2 - 1
    assert [first["rhs"] <= 25**2 - 1, first["rhs"] <= 23**2 - 1] == [bool(first["ok25"]), bool(first["ok23"])]
