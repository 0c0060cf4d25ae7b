"""Log-probs, entropies and gradients over the support of a truncated draw: those of a dense computation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from rollout.engines.sampling.sampling import RowSampling, draw
from rollout.types.generation import SamplingParams
from rollout.types.supports import SUPPORT_LIMIT, listed_supports
from trainer.model.logprobs import chunked_logprobs
from trainer.types.support import Support, Truncation, support_of

VOCABULARY, TOKENS, HIDDEN = 150, 24, 6


def states(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype)
    return hidden, torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=dtype)


def drawn(
    hidden: Tensor, head: Tensor, params: SamplingParams, seed: int = 0
) -> tuple[Tensor, Tensor, Support | None, Support | None]:
    """Tokens and log-probs as the torch engine has them; their support as it lists it, and without the lists."""
    sampling = RowSampling.of([params] * TOKENS, VOCABULARY, torch.device("cpu"))
    uniform = torch.rand(TOKENS, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tokens, logprobs, kept = draw(hidden @ head.t(), sampling, uniform)
    if not params.truncates:
        return tokens, logprobs, None, None
    truncation = Truncation(top_p=params.top_p, top_k=params.top_k, supports=listed_supports(kept or ()))
    listed, recomputed = (
        support_of([(each, np.arange(TOKENS))]) for each in (truncation, replace(truncation, supports=None))
    )
    return tokens, logprobs, listed, recomputed


def dense(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, kept: NDArray[np.bool_]
) -> tuple[Tensor, Tensor]:
    """By autograd over whole rows: softmax over what `kept` [N, V] holds."""
    logits = (hidden @ head.t() / temperature).masked_fill(torch.from_numpy(~kept), -torch.inf)
    logprobs = torch.log_softmax(logits, dim=-1)
    terms = torch.where(torch.from_numpy(kept), logprobs.exp() * logprobs.masked_fill(torch.from_numpy(~kept), 0.0), 0)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -terms.sum(dim=-1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    top_k=st.sampled_from([0, 1, 2, 3, 20, SUPPORT_LIMIT, SUPPORT_LIMIT + 1, VOCABULARY - 1, VOCABULARY, 10_000]),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.5, 1e-6]),
    temperature=st.sampled_from([1.0, 0.3, 0.7, 2.0]),
    seed=st.integers(0, 99),
)
def test_at_equal_weights_the_trainers_logprobs_are_the_engines(
    top_k: int, top_p: float, temperature: float, seed: int
):
    hidden, head = states(torch.float32, seed)
    params = SamplingParams(max_new_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k)
    tokens, logprobs, listed, recomputed = drawn(hidden, head, params, seed)
    for support in (listed, recomputed):
        ours, entropies = chunked_logprobs(hidden, head, tokens, temperature, 7, support)
        torch.testing.assert_close(ours, logprobs, rtol=0, atol=1e-5)
        assert bool((entropies >= -1e-5).all())
    if params.truncates and top_k in (1, 2, 3) and top_p == 1.0:
        full = chunked_logprobs(hidden, head, tokens, temperature, 7)[0]
        assert bool((full < logprobs).all()), "the whole distribution gives every drawn token less"


def mixed_support(rng: np.random.Generator, targets: NDArray[np.int64]) -> tuple[Support, NDArray[np.bool_]]:
    """Listed rows, rows that are recomputed from top-k (their target outside it or not), and rows that keep all; and
    which ids each keeps at temperature 1, where that is listed."""
    kept = np.zeros((TOKENS, VOCABULARY), dtype=np.bool_)
    rows: list[list[int]] = []
    for token, target in enumerate(targets.tolist()):
        ids = [] if token % 3 else list({target, *rng.integers(VOCABULARY, size=5).tolist()})
        kept[token, ids] = True
        rows.append(ids)
    place = np.arange(TOKENS) % 3
    return Support(
        top_p=np.ones(TOKENS), top_k=np.where(place == 1, 4, 0).astype(np.int64), listed=listed_supports(rows)
    ), kept


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_values_and_gradients_are_those_of_a_dense_computation(temperature: float, chunk: int):
    hidden, head = (each.requires_grad_() for each in states())
    rng = np.random.default_rng(2)
    targets = rng.integers(VOCABULARY, size=TOKENS)
    support, kept = mixed_support(rng, targets)
    logits: NDArray[np.float64] = (hidden @ head.t()).detach().numpy()
    for token in range(TOKENS):
        if token % 3 == 1:
            kept[token, np.argsort(-logits[token])[:4]] = True
            kept[token, targets[token]] = True
        elif token % 3 == 2:
            kept[token] = True
    chosen = torch.from_numpy(targets)
    found: list[Any] = []
    weights = torch.randn(2, TOKENS, generator=torch.Generator().manual_seed(8), dtype=torch.float64) * 5
    for logprobs, entropies in (
        chunked_logprobs(hidden, head, chosen, temperature, chunk, support),
        dense(hidden, head, chosen, temperature, kept),
    ):
        loss = logprobs @ weights[0] + entropies @ weights[1]
        found.append((logprobs.detach(), entropies.detach(), *torch.autograd.grad(loss, (hidden, head))))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    untouched = ~kept.any(axis=0)
    assert not found[0][3][torch.from_numpy(untouched)].any(), "what nobody could draw takes no gradient"


@pytest.mark.parametrize("output", [0, 1])
def test_each_output_alone_has_exact_gradients_over_a_support(output: int):
    hidden, head = (each.requires_grad_() for each in states())
    rng = np.random.default_rng(3)
    targets = rng.integers(VOCABULARY, size=TOKENS)
    support, _ = mixed_support(rng, targets)

    def values(a: Tensor, b: Tensor) -> Tensor:
        return chunked_logprobs(a, b, torch.from_numpy(targets), 0.8, 9, support)[output]

    assert torch.autograd.gradcheck(
        values, (hidden[:, :2].detach().requires_grad_(), head[:, :2].detach().requires_grad_())
    )


def test_steep_losses_stay_finite_where_tokens_are_out_of_reach():
    hidden, head = (each.requires_grad_() for each in states(torch.float32))
    support = support_of([(Truncation(top_p=1.0, top_k=1), np.arange(TOKENS))])
    targets = (hidden @ head.t()).argmax(dim=-1)
    logprobs, entropies = chunked_logprobs(hidden, head, targets, 1.0, 8, support)
    assert not logprobs.any() and not entropies.any(), "a draw from one token is certain"
    (1e6 * (logprobs.sum() - entropies.sum())).backward()
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_nothing_truncated_is_no_support():
    assert support_of([(None, np.arange(3)), (None, np.arange(2))]) is None
    assert support_of([]) is None


def test_tokens_of_several_trajectories_keep_their_own_supports():
    first = Truncation(top_p=0.9, top_k=0, supports=listed_supports([[], [4], [], [5, 6]]))
    support = support_of(
        [(first, np.array([1, 3])), (None, np.array([2])), (Truncation(top_p=1.0, top_k=7), np.array([0]))]
    )
    assert support is not None
    assert support.top_p.tolist() == [0.9, 0.9, 1.0, 1.0]
    assert support.top_k.tolist() == [0, 0, 0, 7]
    assert support.listed.counts.tolist() == [1, 2, 0, 0]
    assert support.listed.ids.tolist() == [4, 5, 6]


def test_listed_ids_of_another_vocabulary_are_refused():
    hidden, head = states()
    supports = listed_supports([[0, VOCABULARY]] * TOKENS)
    support = support_of([(Truncation(top_p=0.9, top_k=0, supports=supports), np.arange(TOKENS))])
    with pytest.raises(ValueError, match=rf"kept ids from 0 to {VOCABULARY}; the model knows 0 to {VOCABULARY - 1}"):
        chunked_logprobs(hidden, head, torch.zeros(TOKENS, dtype=torch.int64), 1.0, 8, support)
