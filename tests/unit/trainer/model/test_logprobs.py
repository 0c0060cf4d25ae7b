"""The chunked head pass: right, differentiable, and never wider than a chunk."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model.logprobs import chunked_logprobs


def inputs(
    tokens: int = 7, hidden: int = 5, vocabulary: int = 11, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(tokens, hidden, generator=generator, dtype=dtype).requires_grad_()
    head = torch.randn(vocabulary, hidden, generator=generator, dtype=dtype).requires_grad_()
    return states, head, torch.randint(vocabulary, (tokens,), generator=generator)


def whole(states: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(states @ head.t() / temperature, dim=-1)
    return log_softmax.gather(1, targets[:, None]).squeeze(1), -(log_softmax.exp() * log_softmax).sum(dim=-1)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_give_what_the_whole_gives(chunk: int, temperature: float):
    states, head, targets = inputs()
    for ours, reference in zip(
        chunked_logprobs(states, head, targets, temperature, chunk),
        whole(states, head, targets, temperature),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_gradients_of_logprob_and_entropy_are_exact(temperature: float):
    states, head, targets = inputs()
    assert torch.autograd.gradcheck(lambda s, h: chunked_logprobs(s, h, targets, temperature, 3), (states, head))


@pytest.mark.parametrize("output", [0, 1])
def test_each_output_alone_has_exact_gradients(output: int):
    states, head, targets = inputs()
    assert torch.autograd.gradcheck(lambda s, h: chunked_logprobs(s, h, targets, 1.0, 4)[output], (states, head))


def test_logits_of_no_more_than_a_chunk_exist_at_once():
    states, head, targets = inputs(tokens=64, hidden=4, vocabulary=100, dtype=torch.float32)
    with LargestTensor() as largest:
        logprobs, entropies = chunked_logprobs(states, head, targets, 1.0, 8)
        (logprobs.sum() + entropies.sum()).backward()
    assert largest.numel == 8 * 100
    with LargestTensor() as largest:
        chunked_logprobs(states, head, targets, 1.0, 64)
    assert largest.numel == 64 * 100  # the measure sees a chunk that is too wide


def test_no_tokens_give_no_values_and_zero_gradients():
    states, head, _ = inputs(tokens=0)
    logprobs, _ = chunked_logprobs(states, head, torch.zeros(0, dtype=torch.int64), 1.0, 4)
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert head.grad is not None
    assert not head.grad.any()


def test_half_precision_states_give_float32_logprobs():
    states, head, targets = inputs(dtype=torch.float32)
    low = chunked_logprobs(states.bfloat16(), head.bfloat16(), targets, 1.0, 3)[0]
    reference = whole(states.bfloat16().float(), head.bfloat16().float(), targets, 1.0)[0]
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, reference, rtol=1e-5, atol=1e-5)


def test_a_certain_token_has_zero_entropy_not_nan():
    states, head = (
        torch.tensor([[1.0]], requires_grad=True),
        torch.tensor([[0.0], [-math.inf], [-200.0]], requires_grad=True),
    )
    logprobs, entropies = chunked_logprobs(states, head, torch.tensor([0]), 1.0, 4)
    assert logprobs.tolist() == [0.0]
    assert entropies.tolist() == [0.0]
