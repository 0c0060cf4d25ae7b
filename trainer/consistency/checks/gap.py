"""How large the gap between engine and trainer is, from where on it alarms, and whether it grows. Plain numbers and
numpy.

It owns the measured gap of a set of tokens, a run's own baseline, and the default limits. It must never know weights,
versions or what is done about an alarm, and it measures raw ratios only: which tokens a correction keeps must not
change a reading. A correction that masks more and more looks like a falling gap in what it kept, and one that masks
less like a healthier policy; neither is health.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.config.consistency import GapLimits
from trainer.consistency.checks.mismatch import TAIL_NATS, ess_fraction, estimator_k3, inside
from trainer.types.evidence import Check, CheckFinding, CheckSeverity

NOISE_FLOOR_NATS = 1e-6
"""A baseline below this counts as this: float32 sums in another order differ as much, and three times nothing is no
bound."""
TAIL_SHARE = 1e-3
"""F(2) above this is high. Rounding puts next to no token there: vLLM in bf16 stayed below 0.15 nats on every one of
128 tokens."""
DRIFT_POINTS = 4
"""Fewer measurements have no trend."""
DRIFT_SIGMAS = 3.0
"""A trend rises by this many standard deviations of what scatters round it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapSummary:
    """The gap over a set of tokens, d = log pi_train - log pi_rollout, unclipped."""

    mean_abs: float
    """Mean |d|, nats."""
    k3: float
    """Mean e^d - 1 - d, nats."""
    ess: float
    """Effective sample size of the ratios e^d as a fraction; 1 without tokens."""
    f2: float
    """Share of tokens with ratio outside [1/2, 2]."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GapBaseline:
    """An engine replica's own gap at step 0: same weights, same tokens. What it shows later is held against this."""

    engine: str
    replica: int
    mean_abs: float
    """Mean |d|, nats."""
    k3: float
    """Nats."""
    f2: float
    """Share of tokens with ratio outside [1/2, 2]."""
    tokens: int
    """Tokens that it was measured on."""

    def __post_init__(self) -> None:
        readings = (self.mean_abs, self.k3, self.f2)
        if self.tokens < 1 or not all(math.isfinite(reading) and reading >= 0.0 for reading in readings):
            raise ValueError(
                f"baseline of {self.engine} replica {self.replica}: {self.tokens} tokens, readings {readings}; expected"
                " tokens and finite numbers"
            )


def gap_summary(
    train: Sequence[NDArray[np.float32]], rollout: Sequence[NDArray[np.float32]], masks: Sequence[NDArray[np.bool_]]
) -> GapSummary:
    """The gap over the tokens of `masks`, in float64. A trainer log-prob of -inf (a token that it excludes) makes the
    gap infinite.

    Args:
        train: [T] nats a trajectory.
        rollout: [T] nats a trajectory.
        masks: [T] a trajectory: sampled and scored tokens, all of them, whatever a correction does with them. Nothing
            outside is read.

    Raises:
        ValueError: lengths differ, or a token of the mask is not a number.
    """
    d = inside("train log-probs", train, masks) - inside("rollout log-probs", rollout, masks)
    if np.isnan(d).any():
        raise ValueError(
            f"{int(np.isnan(d).sum())} tokens of the mask have no log-prob (NaN); expected only tokens that were scored"
        )
    if d.size == 0:
        return GapSummary(mean_abs=0.0, k3=0.0, ess=1.0, f2=0.0, num_tokens=0)
    with np.errstate(over="ignore"):
        k3 = float(estimator_k3(d).mean())
    return GapSummary(
        mean_abs=float(np.abs(d).mean()),
        k3=k3,
        ess=ess_fraction(d),
        f2=float((np.abs(d) > TAIL_NATS).mean()),
        num_tokens=int(d.size),
    )


def default_limits(dtype: str, quantization: str, moe: bool, deterministic: bool) -> GapLimits:
    """Limits for an engine that declares these numerics. Half precision and fp8 have the published bounds of mean |d|:
    warn / fail .02 / .05 dense, .03 / .08 with routed experts, .05 / .1 under any quantisation; k3 1e-3 / 1e-2 dense,
    1e-2 / 5e-2 with routed experts.

    float32 has 1e-5 / 1e-3. vLLM in float32 differs from the trainer by 4.8e-7 on average and 2e-5 on its worst token:
    warn lies twenty times above the mean, and fail fifty times above the worst token, so that rounding fails no
    trajectory of even a single token. A head that kept its old weights (5e-3), keys and values of older weights (3e-2)
    and bf16 arithmetic that was not declared (8e-3) fail. k3 is about d^2 / 2 and gets 1e-8 / 1e-5: an rms |d| of
    1.4e-4 and 4.5e-3, the same order as for the means with room for a heavy tail. Routed experts may swap a near tie
    even in float32: ten times as much to warn, the same to fail.

    Deterministic mode warns at 1e-6 and fails at 1e-5, above the worst token of an engine with a KV cache (mean 3.9e-7,
    worst 7e-6): a trajectory may hold few tokens, and rounding must not fail it. k3 gets 1e-11 / 1e-9.

    Args:
        dtype: of the engine's arithmetic: `float32`, `bfloat16`, `float16`; any other is held to the half-precision
            bounds.
        quantization: `none`, or how weights are quantised.
        moe: whether experts are routed.
        deterministic: the run's deterministic mode.

    Source: CONSISTENCY.md, section 4; ENGINES.md, noise floors.
    """
    if deterministic:
        return GapLimits(mean_abs_warn=1e-6, mean_abs_fail=1e-5, k3_warn=1e-11, k3_fail=1e-9)
    k3_warn, k3_fail = (1e-2, 5e-2) if moe else (1e-3, 1e-2)
    if quantization != "none" or "float8" in dtype or "fp8" in dtype:
        return GapLimits(mean_abs_warn=0.05, mean_abs_fail=0.1, k3_warn=k3_warn, k3_fail=k3_fail)
    if dtype == "float32":
        return GapLimits(
            mean_abs_warn=1e-4 if moe else 1e-5, mean_abs_fail=1e-3, k3_warn=1e-7 if moe else 1e-8, k3_fail=1e-5
        )
    mean_abs_warn, mean_abs_fail = (0.03, 0.08) if moe else (0.02, 0.05)
    return GapLimits(mean_abs_warn=mean_abs_warn, mean_abs_fail=mean_abs_fail, k3_warn=k3_warn, k3_fail=k3_fail)


def gap_floor(limits: GapLimits, baseline: GapBaseline | None) -> float:
    """Mean |d| in nats above which a gap alarms at all: the warning ceiling or the multiple of the run's own baseline,
    whichever is lower."""
    if baseline is None:
        return limits.mean_abs_warn
    return min(limits.mean_abs_warn, _baseline_bound(limits, baseline))


def _baseline_bound(limits: GapLimits, baseline: GapBaseline) -> float:
    return limits.baseline_multiple * max(baseline.mean_abs, NOISE_FLOOR_NATS)


def tail_is_high(f2: float, limits: GapLimits, baseline: GapBaseline | None) -> bool:
    """Whether more tokens than usual have a ratio outside [1/2, 2]."""
    return f2 > max(TAIL_SHARE, 0.0 if baseline is None else limits.baseline_multiple * baseline.f2)


def check_gap(metrics: GapSummary, limits: GapLimits, baseline: GapBaseline | None) -> tuple[CheckFinding, ...]:
    """The gap against its ceilings and against the run's own baseline, which do not excuse each other. Above a ceiling
    to fail it fails; all else warns.

    A gap over no token at all is incomplete, not fine.
    """
    return tuple(_gap_findings(metrics, limits, baseline))


def _gap_findings(metrics: GapSummary, limits: GapLimits, baseline: GapBaseline | None) -> Iterator[CheckFinding]:
    if metrics.num_tokens == 0:
        yield CheckFinding.open_question("nothing_scored", "got no scored token; expected at least one")
        return
    readings = (
        ("gap_mean", "mean |d|", metrics.mean_abs, limits.mean_abs_warn, limits.mean_abs_fail),
        ("gap_k3", "k3", metrics.k3, limits.k3_warn, limits.k3_fail),
    )
    for code, name, value, warn, fail in readings:
        if not value <= min(warn, fail):  # NaN is above every ceiling
            detail = f"{name} {value:.3g} nats; expected at most {warn:.3g}, and never above {fail:.3g}"
            yield _finding(CheckSeverity.WARN if value <= fail else CheckSeverity.FAIL, code, detail)
    if not metrics.ess >= max(limits.ess_warn, limits.ess_fail):
        detail = (
            f"effective sample size {metrics.ess:.3g} of the raw ratios; expected at least {limits.ess_warn:g}, and "
            f"never below {limits.ess_fail:g}"
        )
        severity = CheckSeverity.WARN if metrics.ess >= limits.ess_fail else CheckSeverity.FAIL
        yield _finding(severity, "gap_ess", detail)
    if baseline is not None and not metrics.mean_abs <= (bound := _baseline_bound(limits, baseline)):
        detail = (
            f"mean |d| {metrics.mean_abs:.3g} nats; expected at most {bound:.3g}, {limits.baseline_multiple:g} x the "
            "gap at step 0"
        )
        yield _finding(CheckSeverity.WARN, "gap_above_baseline", detail)
    if tail_is_high(metrics.f2, limits, baseline):
        detail = f"{metrics.f2:.2%} of {metrics.num_tokens} tokens have a ratio outside [1/2, 2]"
        yield _finding(CheckSeverity.WARN, "gap_tail", detail)


def check_drift(values: Sequence[float], steps: Sequence[float]) -> tuple[CheckFinding, ...]:
    """Warns where a reading (mean |d| by step, oldest first) at least doubles over the window along its fitted line, by
    more than it scatters round that line: mean |d| of quantised rollouts grows with training while each reading passes.

    Raises:
        ValueError: lengths differ, a reading is not finite, or all steps are the same.
    """
    if len(values) < DRIFT_POINTS:
        return ()
    slope, start, scatter = fitted_line(values, steps)
    width = max(steps) - min(steps)
    rise = slope * width
    if rise <= max(start, NOISE_FLOOR_NATS, DRIFT_SIGMAS * scatter):
        return ()
    detail = (
        f"mean |d| grows by {slope:.3g} nats a step, from {start:.3g} to {start + rise:.3g} over {width:g} steps; "
        "expected a flat line"
    )
    return (_finding(CheckSeverity.WARN, "gap_drift", detail),)


def fitted_line(values: Sequence[float], steps: Sequence[float]) -> tuple[float, float, float]:
    """Slope by step, value at the first step, and standard deviation of the residuals of the least-squares line.

    Raises:
        ValueError: lengths differ, a reading is not finite, or all steps are the same.
    """
    y, x = np.asarray(values, dtype=np.float64), np.asarray(steps, dtype=np.float64)
    if x.shape != y.shape or not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError(f"got {y.size} readings at {x.size} steps; expected as many, all finite")
    centred = x - x.mean()
    if not centred.any():
        raise ValueError(f"all {x.size} readings are of one step; expected different steps")
    slope = float(centred @ y) / float(centred @ centred)
    scatter = float((y - y.mean() - slope * centred).std())
    return slope, float(y.mean() + slope * centred.min()), scatter


def _finding(severity: CheckSeverity, code: str, detail: str) -> CheckFinding:
    return CheckFinding(check=Check.PRECISION, severity=severity, code=code, detail=detail)
