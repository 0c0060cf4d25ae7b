"""What a number format costs a log-prob, against golden vectors."""

from typing import Any

import numpy as np
import pytest
import torch

from trainer.consistency.checks.mismatch import mismatch_metrics
from trainer.model.logprobs import chunked_logprobs

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def close(actual: Any, expected: Any, atol: float = 0.0):
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=atol)


def difference(train: Any, rollout: Any) -> float:
    """Largest |d| of two rows of log-probs."""
    mask = np.ones(len(train), dtype=np.bool_)
    return mismatch_metrics([np.asarray(train)], [np.asarray(rollout)], [mask]).abs_difference_max


def quantised(value: float, dtype: torch.dtype) -> float:
    return torch.tensor(value, dtype=torch.float64).to(dtype).double().item()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_rounded_log_prob_is_off_by_what_the_vectors_say(golden: dict[str, Any], name: str):
    for value, expected in golden[name].items():
        found = quantised(float(value), DTYPES[name])
        close([found, difference([found], [float(value)])], [expected["q"], abs(expected["err"])], atol=1e-13)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_ratio_of_rounded_log_probs_is_that_of_the_vectors(golden: dict[str, Any], name: str):
    train, rollout = (np.array([quantised(value, DTYPES[name])]) for value in (-1.51, -1.32))
    found = mismatch_metrics([train], [rollout], [np.ones(1, dtype=np.bool_)])
    close(1.0 / found.perplexity_ratio, golden[f"{name}_ratio_after_quant"])


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
    close(difference(exact, coarse), vector["max_abs"])


def test_the_trainer_never_takes_a_log_softmax_in_bf16(golden: dict[str, Any]):
    vector = golden["logsoftmax_bf16"]
    head = torch.tensor(vector["logits"], dtype=torch.bfloat16)[:, None]
    logprobs, _ = chunked_logprobs(torch.ones(5, 1, dtype=torch.bfloat16), head, torch.arange(5), 1.0, 2)
    assert difference(logprobs.numpy(), vector["fp64"]) < 2e-6


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
    close(difference(coarse, exact), vector["max_abs"])
    first = mismatch_metrics([coarse], [exact], [np.arange(3) == 0])
    close(1.0 / first.perplexity_ratio, vector["ratio_tok0"])
