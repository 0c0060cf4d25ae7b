"""Number formats as the cause of a gap: of the arithmetic, of the weights, and of log-probs on their way."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.consistency.attribution_room import AS_LOGGED, LIMITS, TableRescorer, ask, parts, trajectory

from rollout.published.number_formats import rounded_to_bf16
from rollout.types.trajectory import Trajectory
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.types.evidence import GapCause


@pytest.mark.parametrize(
    ("tag", "truth"),
    [
        ({"weights_dtype": "bfloat16"}, ScoreOptions(dtype="bfloat16")),
        ({"weights_dtype": "float16"}, ScoreOptions(dtype="float16")),
        ({"weights_dtype": "bfloat16"}, ScoreOptions(dtype="float32")),
        (
            {"weights_dtype": "bfloat16", "quantization": "fp8"},
            ScoreOptions(dtype="bfloat16", weights_dtype="float8_e4m3"),
        ),
        ({"weights_dtype": "int4"}, ScoreOptions(weights_dtype="float8_e4m3")),
    ],
)
def test_other_number_formats_explain_precision(tag: dict[str, Any], truth: ScoreOptions):
    assert parts(ask(TableRescorer({AS_LOGGED: 0.2, truth: 0.01}), trajectory(**tag))) == {GapCause.PRECISION: 0.19}


def test_of_several_number_formats_the_one_that_closes_most_is_the_explanation():
    fp8 = ScoreOptions(dtype="bfloat16", weights_dtype="float8_e4m3")
    rescorer = TableRescorer(
        {AS_LOGGED: 0.2, ScoreOptions(dtype="bfloat16"): 0.15, ScoreOptions(dtype="float32"): 0.25, fp8: 0.1}
    )
    assert parts(ask(rescorer, trajectory(weights_dtype="bfloat16"))) == {GapCause.PRECISION: 0.1}


def rounded_log(scores: NDArray[np.float32]) -> Trajectory:
    """Its log holds these scores, rounded to bfloat16 on the way."""
    built = trajectory()
    logprobs = built.rollout_logprobs.copy()
    logprobs[built.sampled] = rounded_to_bf16(scores)
    return replace(built, rollout_logprobs=logprobs)


SCORES = np.array([-1.32, -1.51, -0.01, -9.87, -20.3, -3.333, -0.777, -2.222], dtype=np.float32)


def test_logprobs_rounded_in_transport_are_precision_and_cost_no_question():
    sent = rounded_log(SCORES)
    gap = SCORES.astype(np.float64) - rounded_to_bf16(SCORES)
    rescorer = TableRescorer({AS_LOGGED: gap.tolist()})
    found = ask(rescorer, sent, limits=LIMITS.model_copy(update={"mean_abs_warn": 1e-3}))
    assert parts(found) == {GapCause.PRECISION: float(np.abs(gap).mean())} and found.residual == pytest.approx(
        0.0, abs=1e-9
    )
    assert not any(options.dtype != "trainer" or options.weights_dtype != "as_published" for options in rescorer.asked)


def test_logprobs_near_the_bfloat16_grid_but_not_on_it_are_not_rounded_ones():
    sent = rounded_log(SCORES)
    gap = SCORES.astype(np.float64) - rounded_to_bf16(SCORES)
    gap[4] += 0.2
    assert ask(TableRescorer({AS_LOGGED: gap.tolist()}), sent).parts == ()


def test_rounding_in_transport_shows_after_the_arithmetic_is_explained():
    sent = rounded_log(SCORES)
    gap = SCORES.astype(np.float64) - rounded_to_bf16(SCORES)
    rescorer = TableRescorer({AS_LOGGED: 0.2, ScoreOptions(dtype="bfloat16"): gap.tolist()})
    found = ask(rescorer, replace(sent, tag=replace(sent.tag, weights_dtype="bfloat16")))
    assert parts(found) == {GapCause.PRECISION: 0.2} and found.residual == pytest.approx(0.0, abs=1e-6)


def test_rounding_in_transport_that_begins_within_a_span_is_precision():
    sent = rounded_log(SCORES)
    gap = np.where(np.arange(8) < 3, 0.0, SCORES.astype(np.float64) - rounded_to_bf16(SCORES))
    sent.rollout_logprobs[sent.sampled] = np.where(np.arange(8) < 3, SCORES, sent.rollout_logprobs[sent.sampled])
    found = ask(
        TableRescorer({AS_LOGGED: gap.tolist()}), sent, limits=LIMITS.model_copy(update={"mean_abs_warn": 1e-4})
    )
    assert parts(found) == {GapCause.PRECISION: float(np.abs(gap).mean())} and found.residual == pytest.approx(
        0.0, abs=1e-9
    )
