"""The mismatch metrics against golden vectors; what is masked never leaks."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.consistency.checks.mismatch import MismatchMetrics, ess_fraction, estimator_k3, mismatch_metrics


def close(actual: Any, expected: Any, atol: float = 0.0):
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=atol)


def array(*values: float) -> NDArray[np.float64]:
    return np.array(values, dtype=np.float64)


def kept(length: int) -> NDArray[np.bool_]:
    return np.ones(length, dtype=np.bool_)


def metrics_of(*sequences: list[float]) -> MismatchMetrics:
    """Metrics of sequences whose d are given."""
    train, rollout = (
        [np.minimum(array(*d), 0.0) - 1.0 for d in sequences],
        [-1.0 - np.maximum(array(*d), 0.0) for d in sequences],
    )
    return mismatch_metrics(train, rollout, [kept(len(d)) for d in sequences])


def v2(golden: dict[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    vector = golden["V2_tokens"]
    train, rollout = ([np.array(row) for row in vector[key]] for key in ("train", "roll"))
    return train, rollout, [np.array(row, dtype=np.bool_) for row in vector["mask"]]


@pytest.mark.parametrize("foul", [math.nan, math.inf, -math.inf])
def test_what_stands_at_a_masked_position_never_leaks(foul: float):
    mask = np.array([True, False, True])
    clean, dirty = array(-1.0, 0.0, -2.0), array(-1.0, foul, -2.0)
    assert mismatch_metrics([dirty - 0.1], [dirty], [mask]) == mismatch_metrics([clean - 0.1], [clean], [mask])


def test_a_non_finite_log_prob_inside_the_mask_is_named_and_counted():
    holed, whole = array(-1.0, math.nan, -math.inf), array(-1.0, -1.0, -1.0)
    with pytest.raises(ValueError, match="2 of 3 train log-probs"):
        mismatch_metrics([holed], [whole], [kept(3)])
    with pytest.raises(ValueError, match="2 of 6 rollout log-probs"):
        mismatch_metrics([whole, whole], [whole, holed], [kept(3), kept(3)])


def test_the_metrics_are_those_of_vector_v2(golden: dict[str, Any]):
    vector, (train, rollout, masks) = golden["V2_tokens"], v2(golden)
    found = mismatch_metrics(train, rollout, masks)
    expected = {
        "k1_mean": found.k1_mean,
        "k2_mean": found.k2_mean,
        "k3_mean": found.k3_mean,
        "abs_dlogp_mean": found.abs_difference_mean,
        "abs_dlogp_max": found.abs_difference_max,
        "prob_diff_mean": found.probability_difference_mean,
        "prob_diff_max": found.probability_difference_max,
        "prob_diff_std_unbiased": found.probability_difference_std,
        "prob_pearson": found.probability_pearson,
        "token_mult_prob_error": found.token_mult_prob_error,
        "chi2_token": found.chi2_token,
        "chi2_seq_product": found.chi2_sequence_product,
        "chi2_seq_geometric_msswift": found.chi2_sequence_geometric,
        "log_ppl_diff_mean": found.log_perplexity_difference_mean,
        "log_ppl_abs_diff": found.log_perplexity_abs_difference_mean,
        "ppl_ratio": found.perplexity_ratio,
        "train_ppl": found.perplexity_train,
        "rollout_ppl": found.perplexity_rollout,
        "ess_frac_raw": found.ess_fraction_raw,
        "ess_count_raw": found.ess_fraction_raw * found.num_tokens,
        "frac_outside_0p5_2": found.fraction_outside_half_to_2,
        "F2": found.fraction_beyond_factor_2,
    }
    for key, value in expected.items():
        assert value is not None, key
        np.testing.assert_allclose(value, vector[key], rtol=1e-9, err_msg=key)
    assert (found.num_tokens, found.num_sequences) == (6, 2)


def test_the_tokens_are_those_of_vector_v2(golden: dict[str, Any]):
    """Each a sequence of its own."""
    vector, (train, rollout, masks) = golden["V2_tokens"], v2(golden)
    ours, theirs = (
        np.concatenate([row[mask] for row, mask in zip(rows, masks, strict=True)]) for rows in (train, rollout)
    )
    tokens = [mismatch_metrics([ours[n : n + 1]], [theirs[n : n + 1]], [kept(1)]) for n in range(ours.size)]
    for name in ("k1", "k2", "k3"):
        close([getattr(token, f"{name}_mean") for token in tokens], vector[name], atol=1e-14)
    close([token.log_perplexity_difference_mean for token in tokens], -np.array(vector["log_ratio"]), atol=1e-14)
    close([token.perplexity_ratio for token in tokens], 1.0 / np.array(vector["ratio"]))
    close([token.chi2_token for token in tokens], np.array(vector["ratio"]) ** 2 - 1.0, atol=1e-14)


def test_the_estimators_are_those_of_vector_v1(golden: dict[str, Any]):
    vector, found = golden["V1_seed"], mismatch_metrics([array(-1.51)], [array(-1.32)], [kept(1)])
    close(
        [found.k1_mean, found.k2_mean, found.k3_mean, 1.0 / found.perplexity_ratio],
        [vector[key] for key in ("k1_token", "k2_token", "k3_token", "is_ratio")],
    )


def test_the_mean_of_k1_and_k3_is_the_divergence_of_vector_v1(golden: dict[str, Any]):
    """Against the uniform policy KL = log 2 - H, so the entropies of the worked example follow as well."""
    vector, found = golden["V1_seed"], {}
    for name, p in (("80_20", 0.8), ("95_05", 0.95)):
        rollout = array(p, 1.0 - p)
        d = math.log(0.5) - np.log(rollout)
        found[name] = float(rollout @ estimator_k3(d))
        k1 = array(*(metrics_of([value]).k1_mean for value in d))
        close([found[name], rollout @ k1], [vector[f"kl_{name}"]] * 2)
        close(math.log(2.0) - found[name], vector[f"H_{name}"])
    close(found["95_05"] / found["80_20"], vector["kl_ratio"])
    close(1.0 - (math.log(2.0) - found["95_05"]) / (math.log(2.0) - found["80_20"]), vector["H_drop"])


@pytest.mark.parametrize("name", ["mu=0.1", "mu=1"])
def test_bias_and_spread_of_the_estimators_are_those_of_vector_v16(golden: dict[str, Any], name: str):
    """Rollout N(0, 1), train N(mu, 1), integrated by Gauss-Hermite quadrature."""
    vector, mu = golden["V16_schulman"][name], float(name.partition("=")[2])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    d = mu * nodes - mu * mu / 2.0
    close(mu * mu / 2.0, vector["true"])
    tokens = [metrics_of([value]) for value in d]
    for k in ("k1", "k2", "k3"):
        values = array(*(getattr(token, f"{k}_mean") for token in tokens))
        mean = float(weights @ values)
        bias = (mean - vector["true"]) / vector["true"]
        close(bias, vector["k2_bias_over_true"] if k == "k2" else vector[f"{k}_bias"], atol=1e-11)
        close(math.sqrt(float(weights @ (values - mean) ** 2)) / vector["true"], vector[f"{k}_std_over_true"])


def test_the_direction_of_k3_is_that_of_vector_v17(golden: dict[str, Any]):
    """One token that the trainer finds e^10 times less likely: 9 nats one way, 22,015 the other."""
    vector, low, high = golden["V17_nemo"], [array(-11.0)], [array(-1.0)]
    forth, back = mismatch_metrics(low, high, [kept(1)]), mismatch_metrics(high, low, [kept(1)])
    close([forth.k3_mean, back.k3_mean], [vector["gen_kl_k3"], vector["policy_kl_k3"]])
    close([forth.token_mult_prob_error, back.token_mult_prob_error], [vector["token_mult_prob_error"]] * 2)


def ess_of(weights: Any) -> float:
    with np.errstate(divide="ignore"):
        return ess_fraction(np.log(np.array(weights)))


def test_the_effective_sample_size_is_that_of_vector_v3(golden: dict[str, Any]):
    vector = golden["V3_weights"]
    for weights, key in (("ratio", "ess_raw"), ("tis_C2", "ess_tis2"), ("icepop_0p5_5", "ess_icepop_0p5_5")):
        close(ess_of(vector[weights]), vector[key])
        close(ess_of(np.array(vector[weights]) * 1e200), vector[key])
    assert ess_of(np.zeros(3)) == 0.0


def test_a_single_spike_moves_the_mean_of_chi2_and_not_its_median():
    """Public fault 18."""
    calm, spiked = metrics_of(*[[0.02, 0.02]] * 9), metrics_of(*[[0.02, 0.02]] * 8, [0.02, 12.0])
    for name in ("chi2_token", "chi2_sequence_product", "chi2_sequence_geometric"):
        assert getattr(spiked, name) > 1e3 * getattr(calm, name)
        close(getattr(spiked, f"{name}_median"), getattr(calm, f"{name}_median"))
    close([calm.k3_median, calm.chi2_token_median], [estimator_k3(array(0.02))[0], math.expm1(0.04)])
    close(
        [calm.chi2_sequence_product_median, calm.chi2_sequence_geometric_median], [math.expm1(0.08), math.expm1(0.04)]
    )
    close(spiked.k3_median, calm.k3_median)


def test_metrics_are_of_raw_ratios():
    """Public fault 21: from capped or masked weights, nothing would ever lie outside the band."""
    d = [math.log(ratio) for ratio in (0.1, 1.0, 1.5, 40.0)]
    found = mismatch_metrics([array(*d) - 1.0], [np.full(4, -1.0)], [kept(4)])
    assert (found.fraction_outside_half_to_2, found.fraction_beyond_factor_2) == (0.5, 0.5)
    close(found.chi2_token, (0.01 + 1.0 + 2.25 + 1600.0) / 4 - 1.0)
    close(found.ess_fraction_raw, ess_fraction(array(*d)))


def test_the_product_of_a_sequence_grows_with_its_length_and_the_geometric_mean_does_not(golden: dict[str, Any]):
    """Public fault 56: sum and mean of d have names of their own."""
    vector, step = golden["V4_length_trap"], math.log(1.1)
    for length, key in ((10, "r1p1_10"), (100, "r1p1_100")):
        found = metrics_of([step] * length)
        close(found.chi2_sequence_product, vector[key] ** 2 - 1.0)
        close(found.chi2_sequence_geometric, 1.1**2 - 1.0)


def test_a_ratio_that_explodes_reads_as_infinite_and_never_as_nan():
    """Public fault 56."""
    found = metrics_of([800.0, 0.0], [0.1, 0.1])
    assert (found.k3_mean, found.chi2_token, found.chi2_sequence_product, found.token_mult_prob_error) == (
        math.inf,
    ) * 4
    close(found.ess_fraction_raw, 0.25)
    close([found.abs_difference_mean, found.abs_difference_max], [200.05, 800.0])


def test_quantiles_are_of_the_absolute_difference():
    found = metrics_of([(-1.0) ** k * k for k in range(101)])
    close(
        [found.abs_difference_p50, found.abs_difference_p90, found.abs_difference_p99, found.abs_difference_max],
        [50.0, 90.0, 99.0, 100.0],
    )


def test_a_sequence_without_a_counted_token_is_in_no_mean():
    first, second = [array(-1.1), array(-5.0)], [array(-1.0), array(-1.0)]
    found = mismatch_metrics(first, second, [kept(1), ~kept(1)])
    assert found == mismatch_metrics(first[:1], second[:1], [kept(1)])
    assert (found.num_sequences, found.probability_difference_std, found.probability_pearson) == (1, None, None)


def test_metrics_of_nothing_are_refused():
    with pytest.raises(ValueError, match="no token of 1 sequences"):
        mismatch_metrics([array(-1.0)], [array(-1.0)], [~kept(1)])
    with pytest.raises(ValueError, match=r"got rollout log-probs of shapes \[\]"):
        mismatch_metrics([array(-1.0)], [], [kept(1)])
    with pytest.raises(ValueError, match="expected one"):
        mismatch_metrics([array(-1.0, -1.0)], [array(-1.0)], [kept(2)])
