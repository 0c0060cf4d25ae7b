"""Tokens and samples against the distribution that they are declared to come from."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.builders import build_group

from trainer.consistency.attribution.scored import Scored
from trainer.consistency.checks.cusum import Cusum
from trainer.consistency.checks.sampling import COPIED, SamplingSums, added, repeat_sums, token_sums
from trainer.consistency.scoring.moments import token_moments
from trainer.consistency.scoring.rows import Sampler
from trainer.consistency.service.sampling_evidence import sampling_of
from trainer.types.evidence import Check, CheckFinding

VOCABULARY = 24
THRESHOLD = 20.0


def distribution(logits: NDArray[np.float64], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0):
    """[N, V] probabilities, plainly: sort, cut, normalise."""
    scaled = logits / temperature
    order = np.argsort(-scaled, axis=1)
    ordered = np.take_along_axis(scaled, order, 1)
    if top_k:
        ordered[:, top_k:] = -np.inf
    p = np.exp(ordered - ordered.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[(p.cumsum(1) - p) >= top_p] = 0.0
    p /= p.sum(1, keepdims=True)
    found = np.zeros_like(p)
    np.put_along_axis(found, order, p, 1)
    return found


def moments_of(p: NDArray[np.float64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """[3, N] by the definitions."""
    log_p = np.where(p > 0, np.log(np.where(p > 0, p, 1.0)), 0.0)
    entropy = -(p * log_p).sum(1)
    return np.stack((log_p[np.arange(tokens.size), tokens], entropy, (p * log_p**2).sum(1) - entropy**2))


def drawn(p: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    return (rng.random((p.shape[0], 1)) < p.cumsum(1) / p.sum(1, keepdims=True)).argmax(1)


@pytest.mark.parametrize(
    "sampler", [Sampler(), Sampler(0.6), Sampler(0.8, 0.9), Sampler(1.0, 1.0, 3), Sampler(1.3, 0.7, 5)]
)
def test_the_moments_are_those_of_the_declared_distribution(sampler: Sampler):
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(37, 8)), rng.normal(size=(VOCABULARY, 8))
    p = distribution(hidden @ head.T, sampler.temperature, sampler.top_k, sampler.top_p)
    tokens = drawn(p, rng)
    found = token_moments(
        torch.from_numpy(hidden), torch.from_numpy(head), torch.from_numpy(tokens), sampler, chunk_tokens=10
    )
    np.testing.assert_allclose(found.numpy(), moments_of(p, tokens), rtol=1e-9, atol=1e-12)


def batches(seed: int, temperature: float, top_k: int = 0) -> Iterator[SamplingSums]:
    """For ever: 60 tokens that are drawn otherwise than declared, which is temperature 1."""
    rng = np.random.default_rng(seed)
    while True:
        logits = rng.normal(size=(60, VOCABULARY)) * 2.0
        tokens = drawn(distribution(logits, temperature, top_k), rng)
        yield token_sums(*moments_of(distribution(logits), tokens))


def alarm(sums: Iterator[SamplingSums], power: float, most: int) -> int | None:
    """Batches until a chart crosses; None where it never does."""
    chart = Cusum(THRESHOLD)
    return next((n + 1 for n, one in zip(range(most), sums, strict=False) if chart.add(one.evidence_of(power))), None)


def test_draws_from_the_declared_distribution_are_as_surprising_as_it_says():
    parts = [one for _, one in zip(range(800), batches(1, 1.0), strict=False)]
    assert np.std([one.z for one in parts]) == pytest.approx(1.0, abs=0.08)
    assert abs(added(parts).z) < 3.0
    assert added(parts).inverse_temperature == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("power", [0.75, 0.9, 1.1, 1.4])
def test_a_healthy_sampler_never_crosses(power: float):
    assert alarm(batches(2, 1.0), power, 500) is None


@pytest.mark.parametrize(
    ("temperature", "top_k", "power", "most"),
    [(0.7, 0, 1.4, 10), (0.9, 0, 1.1, 150), (1.3, 0, 0.75, 10), (1.0, 4, 1.4, 8)],
)
def test_another_temperature_or_top_k_crosses_soon(temperature: float, top_k: int, power: float, most: int):
    assert alarm(batches(3, temperature, top_k), power, most) is not None


def test_the_estimate_of_a_temperature_is_near_it():
    parts = [one for _, one in zip(range(200), batches(4, 1 / 1.1), strict=False)]
    assert added(parts).inverse_temperature == pytest.approx(1.1, abs=0.03)


def test_a_chart_forgets_what_speaks_against_a_change_and_begins_anew_when_it_crossed():
    chart = Cusum(2.0)
    assert [chart.add(nats) for nats in (-5.0, 1.0, 1.5, 1.0)] == [False, False, True, False]
    assert chart.value == 1.0


def test_a_repeat_counts_by_how_unlikely_it_was():
    rare, likely = math.log(0.01), math.log(0.9)
    found = repeat_sums([(b"a", rare), (b"a", rare), (b"b", likely), (b"b", likely)])
    assert (found.num_compared, found.repeats) == (3, 2)
    assert found.expected_repeats == pytest.approx(0.01 + 0.01 + 0.91)
    expected = math.log(0.8 + 0.2 / 0.01) + math.log(1 - COPIED) + math.log(0.8 + 0.2 / 0.91)
    assert found.repeat_evidence == pytest.approx(expected)


def test_samples_of_a_policy_that_is_sure_repeat_without_being_evidence():
    sure = repeat_sums([(b"a", -1e-4)] * 50)
    assert sure.repeats == 49
    assert sure.repeat_evidence == pytest.approx(0.0, abs=0.01)


def test_one_repeat_alone_however_unlikely_is_no_finding():
    assert repeat_sums([(b"a", -500.0), (b"a", -500.0)]).repeat_evidence < THRESHOLD / 3
    assert repeat_sums([(b"a", -500.0)] * 8).repeat_evidence > THRESHOLD


@pytest.mark.parametrize(("copied", "found"), [(0.0, False), (1.0, True)])
def test_a_constant_seed_crosses_and_chance_does_not(copied: float, found: bool):
    rng, chart, crossed = np.random.default_rng(5), Cusum(THRESHOLD), False
    p = np.array([0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05])
    for _ in range(40 if copied else 2000):
        first = rng.choice(p.size, p=p)
        tokens = [first, *(first if rng.random() < copied else rng.choice(p.size, p=p) for _ in range(3))]
        crossed |= chart.add(repeat_sums([(bytes([t]), math.log(p[t])) for t in tokens]).repeat_evidence)
    assert crossed is found


def test_sums_leave_out_what_has_no_score_and_tokens_that_are_known_to_be_others():
    whole, gap, other = (
        Scored(trajectory=one, scores=one.rollout_logprobs, moments=np.stack((one.rollout_logprobs,) * 3))
        for one in (*build_group().trajectories, build_group().trajectories[0])
    )
    assert gap.moments is not None
    gap.moments[:, -1] = np.nan
    broken = Scored(
        trajectory=other.trajectory,
        scores=other.scores,
        moments=other.moments,
        findings=(CheckFinding.failure(Check.TOKENIZER, "drift", "other ids"),),
    )
    found = sampling_of([whole, gap, broken])
    assert found.num_tokens == whole.trajectory.num_sampled + gap.trajectory.num_sampled - 1
    assert found.num_compared == 0
