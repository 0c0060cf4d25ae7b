"""Thresholds of the gradient search against the published levels."""

import json
import math
from typing import Any

import pytest
from support.paths import GOLDEN_FOLDER

from trainer.gradloc.thresholds import set_threshold

GOLDEN: dict[str, Any] = json.loads((GOLDEN_FOLDER / "golden_vectors.json").read_text())
V6 = GOLDEN["V6_thresholds"]
TAU, TOKENS = V6["tau"], V6["N"]


def test_thresholds_of_sums_are_the_published_ones_of_means_times_the_share_of_the_tokens():
    blog, parts = V6["blog"], V6["M"] * V6["W"]
    published = {TOKENS: blog["global_"], TOKENS / V6["M"]: blog["mb"]}
    published |= {TOKENS * int(ranks) / parts: expected for ranks, expected in blog["rank"].items()}
    published |= {int(tokens): expected for tokens, expected in blog["seg"].items()}
    for tokens, expected in published.items():
        ours = set_threshold(TAU, tokens * (1 / TOKENS) ** 2)
        assert ours == pytest.approx(expected * tokens / TOKENS, rel=1e-9)
    readme, whole = GOLDEN["V6_readme_cfg"], 512 * 4000
    assert set_threshold(readme["tau"], 1 / whole) == pytest.approx(readme["trigger_blog"], rel=1e-9)


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
