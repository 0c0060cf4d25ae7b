"""The measured gap, its baseline, limits, alarms and drift; and the versions of spans against the ledger."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.builders import build_trajectory

from rollout.published.number_formats import rounded_to_bf16
from rollout.types.trajectory import VersionSpan
from rollout.types.weights import PolicyVersion
from trainer.config.consistency import GapLimits
from trainer.consistency.checks.gap import (
    GapBaseline,
    GapSummary,
    check_drift,
    check_gap,
    default_limits,
    fitted_line,
    gap_floor,
    gap_summary,
)
from trainer.consistency.checks.versions import check_versions
from trainer.types.evidence import Check, CheckFinding, CheckSeverity

LIMITS = GapLimits(mean_abs_warn=0.02, mean_abs_fail=0.05, k3_warn=1e-3, k3_fail=1e-2)
FINE = GapSummary(mean_abs=0.01, k3=1e-4, ess=0.99, f2=0.0, num_tokens=100)


def row(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)


def mask(*values: int) -> NDArray[np.bool_]:
    return np.array(values, dtype=np.bool_)


def codes(findings: tuple[CheckFinding, ...]) -> list[tuple[str, CheckSeverity]]:
    return [(finding.code, finding.severity) for finding in findings]


def baseline(mean_abs: float, f2: float = 0.0) -> GapBaseline:
    return GapBaseline(engine="vllm", replica=1, mean_abs=mean_abs, k3=1e-4, f2=f2, tokens=4096)


def test_the_gap_is_the_golden_one(golden: dict[str, Any]):
    vector = golden["V2_tokens"]
    rows = [[row(*values) for values in vector[name]] for name in ("train", "roll")]
    found = gap_summary(rows[0], rows[1], [mask(*values) for values in vector["mask"]])
    expected = (vector["abs_dlogp_mean"], vector["k3_mean"], vector["ess_frac_raw"], vector["F2"])
    assert (found.mean_abs, found.k3, found.ess, found.f2) == pytest.approx(expected, rel=1e-6)
    assert found.num_tokens == 6


def test_what_stands_outside_the_mask_does_not_leak():
    train = row(-1.0, float("nan"), float("-inf"), -2.0)
    assert gap_summary([train], [row(-1.5, 0, 0, -2.0)], [mask(1, 0, 0, 1)]).mean_abs == 0.25


def test_a_token_that_the_trainer_excludes_makes_the_gap_infinite_and_fail():
    found = gap_summary([row(-1.0, float("-inf"))], [row(-1.0, -3.0)], [mask(1, 1)])
    assert found == GapSummary(mean_abs=math.inf, k3=math.inf, ess=0.5, f2=0.5, num_tokens=2)
    assert codes(check_gap(found, LIMITS, None))[:2] == [
        ("gap_mean", CheckSeverity.FAIL),
        ("gap_k3", CheckSeverity.FAIL),
    ]


def test_ratios_beyond_every_float_have_a_sample_size_of_one_token():
    found = gap_summary([row(0.0, -1.0)], [row(-2000.0, -1.0)], [mask(1, 1)])
    assert found.k3 == math.inf and found.ess == 0.5


def test_unscored_tokens_inside_the_mask_are_refused():
    with pytest.raises(ValueError, match="1 tokens of the mask"):
        gap_summary([row(float("nan"), -1.0)], [row(-1.0, -1.0)], [mask(1, 1)])
    with pytest.raises(ValueError, match=r"one \[T\]"):
        gap_summary([row(-1.0)], [row(-1.0, -1.0)], [mask(1, 1)])


def test_no_scored_token_is_incomplete_and_not_fine():
    for empty in (gap_summary([], [], []), gap_summary([row(-1.0)], [row(-9.0)], [mask(0)])):
        assert codes(check_gap(empty, LIMITS, None)) == [("nothing_scored", CheckSeverity.INCOMPLETE)]


def test_a_baseline_of_nothing_is_none():
    with pytest.raises(ValueError, match="expected tokens"):
        GapBaseline(engine="vllm", replica=1, mean_abs=0.0, k3=0.0, f2=0.0, tokens=0)
    with pytest.raises(ValueError, match="finite"):
        baseline(math.inf)


@pytest.mark.parametrize(
    ("dtype", "quantization", "moe", "bounds"),
    [
        ("bfloat16", "none", False, (0.02, 0.05, 1e-3, 1e-2)),
        ("bfloat16", "none", True, (0.03, 0.08, 1e-2, 5e-2)),
        ("float16", "none", False, (0.02, 0.05, 1e-3, 1e-2)),
        ("bfloat16", "fp8", False, (0.05, 0.1, 1e-3, 1e-2)),
        ("bfloat16", "fp8", True, (0.05, 0.1, 1e-2, 5e-2)),
        ("float8_e4m3fn", "none", False, (0.05, 0.1, 1e-3, 1e-2)),
        ("float32", "none", False, (1e-5, 1e-3, 1e-8, 1e-5)),
        ("float32", "none", True, (1e-4, 1e-3, 1e-7, 1e-5)),
    ],
)
def test_defaults_follow_the_declared_numerics(dtype: str, quantization: str, moe: bool, bounds: tuple[float, ...]):
    limits = default_limits(dtype, quantization, moe, deterministic=False)
    assert (limits.mean_abs_warn, limits.mean_abs_fail, limits.k3_warn, limits.k3_fail) == bounds
    assert (limits.ess_warn, limits.ess_fail, limits.baseline_multiple) == (0.5, 0.3, 3.0)


def test_deterministic_mode_alarms_at_a_millionth_whatever_the_numerics():
    for dtype, moe in (("float32", False), ("bfloat16", True)):
        assert default_limits(dtype, "none", moe, deterministic=True).mean_abs_warn == 1e-6


@pytest.mark.parametrize(("mean", "worst", "deterministic"), [(4.8e-7, 2e-5, False), (3.9e-7, 7e-6, True)])
def test_the_noise_of_float32_passes_and_its_worst_token_alone_does_not_fail(
    mean: float, worst: float, deterministic: bool
):
    limits = default_limits("float32", "none", False, deterministic)
    normal = GapSummary(mean_abs=mean, k3=worst * mean, ess=1.0, f2=0.0, num_tokens=128)
    assert check_gap(normal, limits, baseline(mean)) == ()
    one_token = GapSummary(mean_abs=worst, k3=worst**2 / 2, ess=1.0, f2=0.0, num_tokens=1)
    assert CheckSeverity.FAIL not in [finding.severity for finding in check_gap(one_token, limits, None)]


@pytest.mark.parametrize("gap", [5e-3, 8.5e-3, 2.7e-2])
def test_a_head_with_old_weights_undeclared_bf16_and_stale_kv_fail_in_float32(gap: float):
    found = check_gap(
        GapSummary(mean_abs=gap, k3=gap**2, ess=1.0, f2=0.0, num_tokens=128),
        default_limits("float32", "none", False, False),
        None,
    )
    assert ("gap_mean", CheckSeverity.FAIL) in codes(found)


@pytest.mark.parametrize(
    ("changed", "code", "severity"),
    [
        ({"mean_abs": 0.03}, "gap_mean", CheckSeverity.WARN),
        ({"mean_abs": 0.06}, "gap_mean", CheckSeverity.FAIL),
        ({"mean_abs": math.nan}, "gap_mean", CheckSeverity.FAIL),
        ({"k3": 2e-3}, "gap_k3", CheckSeverity.WARN),
        ({"k3": 2e-2}, "gap_k3", CheckSeverity.FAIL),
        ({"ess": 0.4}, "gap_ess", CheckSeverity.WARN),
        ({"ess": 0.2}, "gap_ess", CheckSeverity.FAIL),
        ({"f2": 0.01}, "gap_tail", CheckSeverity.WARN),
    ],
)
def test_each_reading_has_its_ceiling(changed: dict[str, float], code: str, severity: CheckSeverity):
    assert check_gap(FINE, LIMITS, None) == ()
    found = check_gap(replace(FINE, **changed), LIMITS, None)
    assert codes(found) == [(code, severity)] and found[0].check is Check.PRECISION


def test_a_reading_at_its_ceiling_passes():
    assert check_gap(GapSummary(mean_abs=0.02, k3=1e-3, ess=0.5, f2=1e-3, num_tokens=9), LIMITS, baseline(0.0067)) == ()


def test_ceiling_and_baseline_are_two_alarms_that_do_not_excuse_each_other():
    assert codes(check_gap(FINE, LIMITS, baseline(0.003))) == [("gap_above_baseline", CheckSeverity.WARN)]
    assert codes(check_gap(FINE, LIMITS, baseline(0.004))) == []
    high = replace(FINE, mean_abs=0.06)
    assert codes(check_gap(high, LIMITS, baseline(0.05))) == [("gap_mean", CheckSeverity.FAIL)]
    assert codes(check_gap(high, LIMITS, baseline(0.01))) == [
        ("gap_mean", CheckSeverity.FAIL),
        ("gap_above_baseline", CheckSeverity.WARN),
    ]


def test_a_baseline_of_nothing_bounds_by_the_noise_of_float32():
    assert gap_floor(LIMITS, baseline(0.0)) == pytest.approx(3e-6)
    assert gap_floor(LIMITS, baseline(0.1)) == 0.02 == gap_floor(LIMITS, None)


def test_a_tail_that_the_engine_has_always_had_is_no_news():
    assert check_gap(replace(FINE, f2=0.01), LIMITS, baseline(0.01, f2=0.005)) == ()


def test_the_reading_counts_the_tokens_that_a_correction_masks():
    """Masking the far token would show a perfect gap: the share that is masked says nothing about health, in either
    direction."""
    train, log, far = row(-1.0, -1.0, -4.0), row(-1.0, -1.0, -1.0), mask(1, 1, 0)
    assert check_gap(gap_summary([train], [log], [far]), LIMITS, None) == ()
    assert ("gap_mean", CheckSeverity.FAIL) in codes(
        check_gap(gap_summary([train], [log], [mask(1, 1, 1)]), LIMITS, None)
    )


def test_the_slope_is_the_golden_one(golden: dict[str, Any]):
    vector = golden["V19_staleness_slope"]
    for name in ("flat", "rising"):
        assert fitted_line(vector[name], vector["k"])[0] == pytest.approx(vector[f"{name}_slope"], rel=1e-9)
    slope, start, _ = fitted_line(vector["rising"], [2 * k for k in vector["k"]])
    expected = (vector["rising_slope"] / 2, vector["rising_intercept"])
    assert (slope, start) == pytest.approx(expected, rel=1e-9)


def test_the_line_is_least_squares():
    random = np.random.default_rng(0)
    steps, values = np.sort(random.choice(99, size=20, replace=False)), random.normal(size=20)
    slope, start, scatter = fitted_line(values.tolist(), steps.tolist())
    wanted = np.polynomial.Polynomial.fit(steps, values, 1)
    residuals = values - wanted(steps)
    assert (slope, start) == pytest.approx((float(wanted.deriv()(0)), float(wanted(steps[0]))), rel=1e-9)
    assert scatter == pytest.approx(residuals.std(), rel=1e-9)


def test_drift_alarms_on_the_rising_series_and_not_on_the_flat_one(golden: dict[str, Any]):
    vector = golden["V19_staleness_slope"]
    assert check_drift(vector["flat"], vector["k"]) == ()
    assert codes(check_drift(vector["rising"], vector["k"])) == [("gap_drift", CheckSeverity.WARN)]
    assert check_drift(vector["rising"][:3], vector["k"][:3]) == ()


def test_a_quantised_rollout_that_triples_in_32_steps_drifts_while_each_reading_passes():
    noise = np.random.default_rng(0).normal(scale=5e-4, size=32)
    tensorwise, plain = (np.linspace(start, end, 32) + noise for start, end in ((0.010, 0.031), (0.006, 0.009)))
    limits = default_limits("bfloat16", "fp8", False, False)
    assert all(check_gap(replace(FINE, mean_abs=float(value)), limits, None) == () for value in tensorwise)
    assert codes(check_drift(tensorwise.tolist(), range(32))) == [("gap_drift", CheckSeverity.WARN)]
    assert check_drift(plain.tolist(), range(32)) == ()


def test_one_spike_at_the_end_is_not_a_drift():
    assert check_drift([0.01] * 15 + [0.2], range(16)) == ()


def test_a_line_needs_readings_of_different_steps():
    for values, steps in (([0.1, 0.2], [3.0, 3.0]), ([0.1, 0.2], [1.0]), ([0.1, math.nan], [1.0, 2.0])):
        with pytest.raises(ValueError, match="expected"):
            fitted_line(values, steps)


def test_the_bfloat16_grid_is_the_golden_one(golden: dict[str, Any]):
    for value, expected in golden["bf16"].items():
        assert rounded_to_bf16(row(float(value)))[0] == expected["q"]
    assert rounded_to_bf16(row(float("-inf")))[0] == -math.inf
    assert rounded_to_bf16(row(1.00390625, 1.01171875)).tolist() == [1.0, 1.015625], "ties go to the even neighbour"


V = [PolicyVersion(1, version) for version in range(5)]


def versions(
    *spans: tuple[PolicyVersion, int], known: tuple[PolicyVersion, ...] = tuple(V), committed: PolicyVersion = V[4]
) -> tuple[CheckFinding, ...]:
    return check_versions(build_trajectory(spans=spans), known=known, committed=committed)


def test_spans_that_the_ledger_knows_pass():
    assert versions((V[2], 4), (V[2], 2), (V[4], 3)) == ()


def test_a_version_that_the_ledger_does_not_know_fails_and_names_its_tokens():
    found = versions((V[1], 2), (V[3], 3), known=(V[0], V[1]))
    assert codes(found) == [("unknown_version", CheckSeverity.FAIL)]
    assert found[0].check is Check.VERSION and found[0].positions == (6, 7, 8) and "e1-v3" in found[0].detail


def test_a_version_that_is_not_committed_yet_fails_since_its_age_would_be_negative():
    assert codes(versions((V[3], 2), (V[4], 2), committed=V[3])) == [("uncommitted_version", CheckSeverity.FAIL)]
    orphan, resumed = PolicyVersion(1, 4), PolicyVersion(2, 2)
    assert codes(versions((orphan, 2), known=(orphan, resumed), committed=resumed)) == [
        ("uncommitted_version", CheckSeverity.FAIL)
    ]


@pytest.mark.parametrize(
    "spans", [((V[3], 2), (V[2], 2)), ((PolicyVersion(2, 1), 2), (V[2], 2)), ((V[3], 2), (PolicyVersion(2, 2), 2))]
)
def test_neither_epoch_nor_version_falls_within_a_trajectory(spans: tuple[tuple[PolicyVersion, int], ...]):
    known = (*V, PolicyVersion(2, 1), PolicyVersion(2, 2), PolicyVersion(2, 4))
    found = versions(*spans, known=known, committed=PolicyVersion(2, 4))
    assert codes(found) == [("version_regressed", CheckSeverity.FAIL)] and found[0].positions == (6, 7)


def test_a_new_trainer_epoch_may_go_on_where_the_old_one_stood():
    resumed = (PolicyVersion(2, 2), PolicyVersion(2, 3))
    assert versions((V[2], 2), (resumed[0], 2), (resumed[1], 2), known=(*V, *resumed), committed=resumed[1]) == ()


@pytest.mark.parametrize(("epoch", "version"), [(1, -1), (0, 0)])
def test_an_unknown_or_negative_version_cannot_even_be_named(epoch: int, version: int):
    with pytest.raises(ValueError, match="never a default"):
        PolicyVersion(epoch, version)


def test_versions_are_aligned_with_the_tokens_that_they_sampled():
    built = build_trajectory(spans=((V[1], 3), (V[2], 2)))
    assert built.token_versions().tolist() == [-1] * 4 + [1] * 3 + [2] * 2
    for shift in (-1, 1):
        with pytest.raises(ValueError, match=built.trajectory_id):
            replace(
                built,
                version_spans=tuple(VersionSpan(s.policy, s.start + shift, s.end + shift) for s in built.version_spans),
            )
