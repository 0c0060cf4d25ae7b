"""What is sampled, and with which log-prob: temperature, truncation, inverse CDF, streams of uniforms."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.engines.sampling.sampling import RowSampling, draw, uniforms
from rollout.engines.sampling.truncation import least_kept
from rollout.types.generation import SamplingParams
from rollout.types.supports import SUPPORT_LIMIT

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -3.0]


def rows(*params: SamplingParams) -> RowSampling:
    return RowSampling.of(list(params), len(LOGITS), torch.device("cpu"))


def draws(params: SamplingParams, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    logits = torch.tensor([LOGITS]).expand(uniform.size, -1)
    tokens, logprobs, _ = draw(logits, rows(*[params] * uniform.size), torch.from_numpy(uniform)[:, None])
    return tokens.numpy(), logprobs.numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_tokens_come_as_often_as_their_logprobs_say(temperature: float):
    grid = (np.arange(20_000) + 0.5) / 20_000
    tokens, logprobs = draws(SamplingParams(max_new_tokens=1, temperature=temperature), grid)
    expected = np.exp(np.array(LOGITS) / temperature)
    expected /= expected.sum()
    assert np.abs(np.bincount(tokens, minlength=6) / grid.size - expected).max() < 1e-4
    assert np.abs(np.exp(logprobs) - expected[tokens]).max() < 1e-6


def test_top_k_leaves_the_k_likeliest_and_renormalises():
    tokens, logprobs = draws(SamplingParams(max_new_tokens=1, top_k=2), np.array([1e-9, 0.5, 0.8, 1 - 1e-9]))
    kept = np.exp(LOGITS[:2]) / np.exp(LOGITS[:2]).sum()
    assert tokens.tolist() == [0, 0, 1, 1]
    assert np.allclose(np.exp(logprobs), kept[tokens], atol=1e-6)


def test_top_p_keeps_the_shortest_head_that_reaches_p():
    probs = np.exp(LOGITS) / np.exp(LOGITS).sum()
    p = float(probs[:2].sum() + probs[2] / 2)
    tokens, logprobs = draws(SamplingParams(max_new_tokens=1, top_p=p), np.linspace(1e-6, 1 - 1e-6, 500))
    assert set(tokens.tolist()) == {0, 1, 2}
    assert np.allclose(np.exp(logprobs), (probs / probs[:3].sum())[tokens], atol=1e-6)


def test_top_p_always_keeps_the_likeliest_token():
    tokens, logprobs = draws(SamplingParams(max_new_tokens=1, top_p=1e-6), np.array([0.01, 0.99]))
    assert tokens.tolist() == [0, 0] and np.allclose(logprobs, 0)


def test_each_row_has_its_own_parameters():
    sampling = rows(
        SamplingParams(max_new_tokens=1, top_k=1),
        SamplingParams(max_new_tokens=1),
        SamplingParams(max_new_tokens=1, temperature=0.01),
    )
    logprobs = sampling.processed_logprobs(torch.tensor([LOGITS] * 3)).exp()
    assert (logprobs > 0).sum(1).tolist()[:2] == [1, 6]
    assert torch.allclose(logprobs[1], torch.softmax(torch.tensor(LOGITS), 0))
    assert logprobs[2, 0] > 0.999


def test_what_each_draw_kept_is_listed_where_it_is_little():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 200, generator=generator)
    params = (
        SamplingParams(max_new_tokens=1, top_k=3),
        SamplingParams(max_new_tokens=1, top_k=SUPPORT_LIMIT),
        SamplingParams(max_new_tokens=1, top_k=SUPPORT_LIMIT + 1),
        SamplingParams(max_new_tokens=1, top_p=0.3, temperature=0.5),
        SamplingParams(max_new_tokens=1),
    )
    sampling = RowSampling.of(list(params), 200, torch.device("cpu"))
    tokens, logprobs, kept = draw(logits, sampling, torch.full((5, 1), 0.7, dtype=torch.float64))
    assert kept is not None
    processed = sampling.processed_logprobs(logits)
    for row in (0, 1, 3):
        assert set(kept[row]) == set(torch.nonzero(processed[row] > -torch.inf).flatten().tolist())
        assert int(tokens[row]) in kept[row]
        inside = torch.log_softmax(logits[row, kept[row]] / params[row].temperature, dim=-1)
        assert float(logprobs[row]) == pytest.approx(float(inside[kept[row].index(int(tokens[row]))]), abs=1e-5)
    assert [len(row) for row in kept][:3] == [3, SUPPORT_LIMIT, 0]
    assert kept[2] == kept[4] == [], "too many, and all"
    assert draw(logits, RowSampling.of([params[4]] * 5, 200, torch.device("cpu")), torch.full((5, 1), 0.5))[2] is None


@pytest.mark.parametrize("top_k", [0, 1, 40, 1500])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 1e-6])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_the_cut_is_that_of_a_whole_sort_however_wide_the_vocabulary(top_k: int, top_p: float, scale: float):
    """Flat and sharp rows, next to rows that truncate otherwise or not at all."""
    logits = scale * torch.randn(6, 3000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ks, ps = [top_k, 0, 7, 1200, 0, top_k], [top_p, 1.0, 0.8, 0.95, 0.95, top_p]
    for chosen in ([0, 5], [0, 1, 2, 3, 4, 5]):
        widths = torch.tensor([[ks[row] or 3000] for row in chosen])
        shares = torch.tensor([[ps[row]] for row in chosen], dtype=torch.float64)
        least = least_kept(logits[chosen], widths, shares, int(widths.max()))
        for row, found in zip(chosen, least.flatten().tolist(), strict=True):
            ordered = np.sort(logits[row].numpy())[::-1][: ks[row] or 3000]
            probabilities = np.exp(ordered) / np.exp(ordered).sum()
            number = int((np.cumsum(probabilities) - probabilities < ps[row]).sum())
            kept = int((logits[row] >= found).sum())
            assert kept == (max(1, number) if ps[row] < 1 else ordered.size), (chosen, row)


@given(key=st.integers(0, 2**63 - 1), first=st.integers(0, 40), count=st.integers(1, 40))
def test_number_i_of_a_stream_depends_on_key_and_i_alone(key: int, first: int, count: int):
    uniforms(key ^ 1, 3, 5)  # what was asked before does not matter
    fresh = (np.random.Philox(key=key).random_raw(first + count) >> np.uint64(12)).astype(np.float64)
    assert np.array_equal(uniforms(key, first, count), ((fresh + 0.5) * 2.0**-52)[first:])


def test_the_extremes_of_a_stream_stay_inside_a_distribution():
    ends = np.array([0.5 * 2.0**-52, 1 - 0.5 * 2.0**-52])
    tokens, logprobs = draws(SamplingParams(max_new_tokens=1), ends)
    assert tokens.tolist() == [0, 5] and np.isfinite(logprobs).all()
