"""The split of a ratio, the mismatch metrics and the precision of log-probs, against golden vectors; what is masked
never leaks."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainer.consistency.metrics.mismatch import (
    MismatchMetrics,
    ess_fraction,
    estimator_k1,
    estimator_k2,
    estimator_k3,
    fraction_outside,
    mismatch_metrics,
)
from trainer.consistency.metrics.ratios import RatioSplit, estimate_by_lag, log_ratios, split_ratios, token_ratios
from trainer.model.logprobs import chunked_logprobs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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


def quantised(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=torch.float64).to(dtype).double().item()


# --- the split


def test_the_ratio_splits_as_in_vector_v19(golden: dict[str, Any]):
    vector = golden["V19_decomp"]
    now, behaviour, rollout = (
        array(vector[key]) for key in ("lp_train_now", "lp_train_at_rollout_version", "lp_rollout")
    )
    split = split_ratios(now=now, behaviour=behaviour, rollout=rollout, mask=kept(1))
    close(
        [split.d_stale[0], split.d_engine[0], split.d_total[0]],
        [vector[key] for key in ("staleness_log", "engine_log", "total_log")],
    )
    ratios = [split.staleness_ratio[0], split.engine_ratio[0], split.total_ratio[0]]
    close(ratios, [vector[key] for key in ("staleness_ratio", "engine_ratio", "total_ratio")])


NATS = st.floats(min_value=-60.0, max_value=0.0, width=32)


@given(st.lists(st.tuples(NATS, NATS, NATS, st.booleans()), min_size=1, max_size=8))
def test_invariant_7_staleness_ratio_times_engine_ratio_is_the_total_ratio(
    tokens: list[tuple[float, float, float, bool]],
):
    now, behaviour, rollout = (np.array(column, dtype=np.float32) for column in list(zip(*tokens, strict=True))[:3])
    split = split_ratios(
        now=now, behaviour=behaviour, rollout=rollout, mask=np.array([token[3] for token in tokens], dtype=np.bool_)
    )
    np.testing.assert_allclose(split.staleness_ratio * split.engine_ratio, split.total_ratio, rtol=1e-6)
    np.testing.assert_allclose(split.d_stale + split.d_engine, split.d_total, atol=1e-12)
    assert not split.d_total[~split.mask].any()
    assert (split.total_ratio[~split.mask] == 1.0).all()


@pytest.mark.parametrize("foul", [math.nan, math.inf, -math.inf])
def test_what_stands_at_a_masked_position_never_leaks(foul: float):
    mask = np.array([True, False, True])
    clean, dirty = array(-1.0, 0.0, -2.0), array(-1.0, foul, -2.0)
    expected = split_ratios(now=clean - 0.1, behaviour=clean - 0.3, rollout=clean, mask=mask)
    split = split_ratios(now=dirty - 0.1, behaviour=dirty - 0.3, rollout=dirty, mask=mask)
    for name in ("d_total", "d_stale", "d_engine", "total_ratio"):
        np.testing.assert_array_equal(getattr(split, name), getattr(expected, name))
    measured = mismatch_metrics([dirty - 0.1], [dirty], [mask], corrected_weights=[dirty + 3.0])
    assert measured == mismatch_metrics([clean - 0.1], [clean], [mask], corrected_weights=[clean + 3.0])
    assert estimate_by_lag(dirty, np.array([0, -1, 1]), mask).slope == 1.0
    assert token_ratios(dirty, mask)[1] == 1.0


def test_a_non_finite_log_prob_inside_the_mask_is_named_and_counted():
    holed = array(-1.0, math.nan, -math.inf)
    for call in (
        lambda: log_ratios(holed, array(-1.0, -1.0, -1.0), kept(3)),
        lambda: mismatch_metrics([holed], [array(-1.0, -1.0, -1.0)], [kept(3)]),
    ):
        with pytest.raises(ValueError, match="2 of 3 train log-probs"):
            call()
    with pytest.raises(ValueError, match="2 of 3 behaviour log-probs"):
        split_ratios(now=array(0, 0, 0), behaviour=holed, rollout=array(0, 0, 0), mask=kept(3))


def test_arrays_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="rollout log-probs have shape"):
        log_ratios(array(-1.0, -1.0), array(-1.0), kept(2))
    with pytest.raises(ValueError, match="lags have shape"):
        estimate_by_lag(array(-1.0), np.array([0, 1]), kept(1))
    with pytest.raises(ValueError, match="expected one"):
        RatioSplit(d_total=array(0), d_stale=array(0), d_engine=array(0, 0), mask=kept(1))


# --- staleness and engine without a recompute


@pytest.mark.parametrize("name", ["flat", "rising"])
def test_the_gap_by_lag_has_the_slope_of_vector_v19(golden: dict[str, Any], name: str):
    vector = golden["V19_staleness_slope"]
    sign = array(1.0, -1.0, -1.0, 1.0)
    estimate = estimate_by_lag(np.array(vector[name]) * sign, np.array(vector["k"]), kept(4))
    close(estimate.slope, vector[f"{name}_slope"])
    close(estimate.mean_abs, vector[name])
    assert estimate.intercept is not None
    if name == "rising":
        close(estimate.intercept, vector["rising_intercept"])


def test_the_line_by_lag_is_least_squares_over_tokens():
    rng = np.random.default_rng(0)
    lags, d = rng.choice([0, 1, 4], p=[0.7, 0.2, 0.1], size=200), rng.normal(size=200)
    estimate = estimate_by_lag(d, lags, kept(200))
    assert estimate.slope is not None and estimate.intercept is not None
    np.testing.assert_allclose([estimate.slope, estimate.intercept], np.polyfit(lags, np.abs(d), 1), rtol=1e-9)
    assert estimate.num_tokens.sum() == 200


def test_one_lag_has_a_mean_and_no_line():
    estimate = estimate_by_lag(array(0.1, -0.3), np.array([2, 2]), kept(2))
    assert (estimate.slope, estimate.intercept, estimate.lags.tolist(), estimate.num_tokens.tolist()) == (
        None,
        None,
        [2],
        [2],
    )
    close(estimate.mean_abs, [0.2])
    assert estimate_by_lag(array(0.1), np.array([0]), ~kept(1)).lags.size == 0


def test_a_token_newer_than_the_weights_that_score_it_is_an_error():
    with pytest.raises(ValueError, match="1 tokens inside the mask have a negative lag"):
        estimate_by_lag(array(0.1, 0.1), np.array([0, -1]), kept(2))


# --- metrics


def test_the_metrics_are_those_of_vector_v2(golden: dict[str, Any]):
    vector, (train, rollout, masks) = golden["V2_tokens"], v2(golden)
    tis = [np.minimum(np.exp(ours - theirs), 2.0) for ours, theirs in zip(train, rollout, strict=True)]
    found = mismatch_metrics(train, rollout, masks, corrected_weights=tis)
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
        "ess_frac_tis2": found.ess_fraction_corrected,
        "ess_count_raw": found.ess_fraction_raw * found.num_tokens,
        "frac_outside_0p5_2": found.fraction_outside_half_to_2,
        "F2": found.fraction_beyond_factor_2,
    }
    for key, value in expected.items():
        assert value is not None, key
        np.testing.assert_allclose(value, vector[key], rtol=1e-9, err_msg=key)
    assert (found.num_tokens, found.num_sequences) == (6, 2)


def test_the_tokens_and_sequences_are_those_of_vector_v2(golden: dict[str, Any]):
    vector, (train, rollout, masks) = golden["V2_tokens"], v2(golden)
    rows = [log_ratios(ours, theirs, mask) for ours, theirs, mask in zip(train, rollout, masks, strict=True)]
    d = np.concatenate([row[mask] for row, mask in zip(rows, masks, strict=True)])
    close(d, vector["log_ratio"], atol=1e-14)
    close(token_ratios(d, kept(6)), vector["ratio"])
    for name, estimator in (("k1", estimator_k1), ("k2", estimator_k2), ("k3", estimator_k3)):
        close(estimator(d), vector[name], atol=1e-14)
    sizes = np.array([mask.sum() for mask in masks])
    sums = np.array([row.sum() for row in rows])
    close(np.exp(sums), vector["seq_product"])
    close(np.exp(sums / sizes), vector["seq_geo"])
    close(-sums / sizes, vector["log_ppl_diff"])
    close(fraction_outside(d, 0.5, 5.0), vector["frac_outside_0p5_5"])


def test_the_estimators_are_those_of_vector_v1(golden: dict[str, Any]):
    vector, d = golden["V1_seed"], array(-1.51) - array(-1.32)
    tokens = [
        estimator_k1(d)[0],
        estimator_k2(d)[0],
        estimator_k3(d)[0],
        token_ratios(d, kept(1))[0],
        1.0 - token_ratios(d, kept(1))[0],
    ]
    close(tokens, [vector[key] for key in ("k1_token", "k2_token", "k3_token", "is_ratio", "is_dev")])


def test_the_mean_of_k1_and_k3_is_the_divergence_of_vector_v1(golden: dict[str, Any]):
    """Against the uniform policy KL = log 2 - H, so the entropies of the worked example follow as well."""
    vector, found = golden["V1_seed"], {}
    for name, p in (("80_20", 0.8), ("95_05", 0.95)):
        rollout = array(p, 1.0 - p)
        d = math.log(0.5) - np.log(rollout)
        found[name] = float(rollout @ estimator_k3(d))
        close([found[name], rollout @ estimator_k1(d)], [vector[f"kl_{name}"]] * 2)
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
    for k, estimator in (("k1", estimator_k1), ("k2", estimator_k2), ("k3", estimator_k3)):
        values = estimator(d)
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


def test_the_effective_sample_size_is_that_of_vector_v3(golden: dict[str, Any]):
    vector = golden["V3_weights"]
    for weights, key in (("ratio", "ess_raw"), ("tis_C2", "ess_tis2"), ("icepop_0p5_5", "ess_icepop_0p5_5")):
        close(ess_fraction(np.array(vector[weights])), vector[key])
        close(ess_fraction(np.array(vector[weights]) * 1e200), vector[key])
    assert ess_fraction(np.zeros(3)) == 0.0


@pytest.mark.parametrize("weights", [[], [1.0, -1.0], [1.0, math.nan], [math.inf]])
def test_weights_that_are_no_weights_have_no_effective_sample_size(weights: list[float]):
    with pytest.raises(ValueError, match="finite and not negative"):
        ess_fraction(np.array(weights))


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


def test_metrics_are_of_raw_ratios_whatever_the_loss_weighs_with():
    """Public fault 21: from capped or masked weights, nothing would ever lie outside the band."""
    d = [math.log(ratio) for ratio in (0.1, 1.0, 1.5, 40.0)]
    train, rollout = [array(*d) - 1.0], [np.full(4, -1.0)]
    weights = array(0.0, 1.0, 1.5, 2.0)
    raw, corrected = (mismatch_metrics(train, rollout, [kept(4)], corrected_weights=used) for used in (None, [weights]))
    assert raw.ess_fraction_corrected is None
    close(corrected.ess_fraction_corrected, ess_fraction(weights))
    for found in (raw, corrected):
        assert (found.fraction_outside_half_to_2, found.fraction_beyond_factor_2) == (0.5, 0.5)
        close(found.chi2_token, (0.01 + 1.0 + 2.25 + 1600.0) / 4 - 1.0)
        close(found.ess_fraction_raw, ess_fraction(np.exp(array(*d))))


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
    with pytest.raises(ValueError, match="got rollout log-probs of 0 sequences"):
        mismatch_metrics([array(-1.0)], [], [kept(1)])
    with pytest.raises(ValueError, match="0 < low < high"):
        fraction_outside(array(0.0), -0.5, 2.0)


# --- what a number format costs


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_rounded_log_prob_is_off_by_what_the_vectors_say(golden: dict[str, Any], name: str):
    for value, expected in golden[name].items():
        found = quantised(float(value), DTYPES[name])
        close(
            [found, log_ratios(array(found), array(float(value)), kept(1))[0]],
            [expected["q"], expected["err"]],
            atol=1e-13,
        )


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_ratio_of_rounded_log_probs_is_that_of_the_vectors(golden: dict[str, Any], name: str):
    train, rollout = (array(quantised(value, DTYPES[name])) for value in (-1.51, -1.32))
    close(token_ratios(log_ratios(train, rollout, kept(1)), kept(1)), [golden[f"{name}_ratio_after_quant"]])


@pytest.mark.parametrize("name", list(DTYPES))
def test_rounding_stays_within_the_relative_step_of_the_format(golden: dict[str, Any], name: str):
    step = golden["rel_eps"][name]
    assert step == torch.finfo(DTYPES[name]).eps / 2
    worst = max(
        abs(quantised(value, DTYPES[name]) - value) / value
        for value in np.random.default_rng(0).uniform(1.0, 2.0, 500).tolist()
    )
    assert step / 4 < worst <= step


def test_a_log_softmax_in_bf16_shows_as_the_gap_of_the_vectors(golden: dict[str, Any]):
    vector = golden["logsoftmax_bf16"]
    logits = torch.tensor(vector["logits"], dtype=torch.float64)
    exact, coarse = (
        torch.log_softmax(logits.to(dtype), dim=0).double().numpy() for dtype in (torch.float64, torch.bfloat16)
    )
    close(exact, vector["fp64"])
    close(coarse, vector["bf16"])
    close(mismatch_metrics([exact], [coarse], [kept(5)]).abs_difference_max, vector["max_abs"])


def test_the_trainer_never_takes_a_log_softmax_in_bf16(golden: dict[str, Any]):
    vector = golden["logsoftmax_bf16"]
    head = torch.tensor(vector["logits"], dtype=torch.bfloat16)[:, None]
    logprobs, _ = chunked_logprobs(torch.ones(5, 1, dtype=torch.bfloat16), head, torch.arange(5), 1.0, 2)
    found = mismatch_metrics([logprobs.numpy()], [np.array(vector["fp64"])], [kept(5)])
    assert found.abs_difference_max < 2e-6


def test_logits_of_a_bf16_head_show_as_the_gap_of_the_vectors(golden: dict[str, Any]):
    vector = golden["logits_bf16_head"]
    rounded = [quantised(logit, torch.bfloat16) for logit in vector["logits"]]
    exact, coarse = (
        torch.log_softmax(torch.tensor(logits, dtype=torch.float64), dim=0).numpy()
        for logits in (vector["logits"], rounded)
    )
    close(rounded, vector["rounded"])
    close(exact, vector["fp64"])
    close(coarse, vector["after"])
    close(mismatch_metrics([coarse], [exact], [kept(3)]).abs_difference_max, vector["max_abs"])
    close(token_ratios(log_ratios(coarse, exact, kept(3)), kept(3))[0], vector["ratio_tok0"])
