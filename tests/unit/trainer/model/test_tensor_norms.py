"""Norms are those of float64 at every size and of every kind of numbers, wherever the trainer takes one."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainer
from trainer.model.blocks import block_norms
from trainer.model.tensor_norms import squared_norms
from trainer.optim.muon import newton_schulz, orthogonalised

CPU = torch.device("cpu")


def exact(tensor: Tensor) -> float:
    """In float64, a slice at a time."""
    return math.sqrt(math.fsum(float(np.square(part, dtype=np.float64).sum()) for part in slices(tensor)))


def slices(tensor: Tensor) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    flat = tensor.reshape(-1)
    return [flat[start : start + 2**20].double().numpy() for start in range(0, flat.numel(), 2**20)]


@pytest.mark.parametrize("size", [0, 1, 511, 513, 200_003])
@pytest.mark.parametrize("value", [0.1, 3e-9, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_that_of_float64(size: int, value: float | None, dtype: torch.dtype):
    """Equal numbers are the hardest: all roundings go one way. Torch's own norm of 100 million is 6 % off."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(size, generator=generator) if value is None else torch.full((size,), value)
    tensor = numbers.to(dtype)
    (square,) = squared_norms([tensor]).tolist()
    assert math.sqrt(square) == pytest.approx(exact(tensor), rel=1e-6, abs=0)


def test_order_and_kinds_of_tensors_are_kept():
    transposed = torch.arange(12.0).reshape(3, 4).t()
    found = squared_norms([torch.full((3,), 2.0), torch.zeros(0), transposed, torch.tensor(3.0)])
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([12.0, 0.0, 506.0, 9.0], rel=1e-6)
    assert squared_norms([]).shape == (0,)
    assert squared_norms([torch.tensor([1.0, math.nan]), torch.tensor([-math.inf])]).isfinite().tolist() == [False] * 2


def test_no_gradient_flows_and_none_is_needed():
    assert not squared_norms([nn.Parameter(torch.ones(600))]).requires_grad


def test_the_norm_of_a_block_and_of_a_muon_matrix_are_right():
    tensor = torch.full((200_003,), 0.1)
    assert block_norms([[tensor], []], CPU)[0] == pytest.approx(exact(tensor), rel=1e-6)
    matrix = torch.randn((4, 6), generator=torch.Generator().manual_seed(0))
    alone, both = orthogonalised(matrix, torch.float32), orthogonalised(torch.stack([matrix, matrix]), torch.float32)
    torch.testing.assert_close(both[1], alone)
    torch.testing.assert_close(alone, newton_schulz(matrix / exact(matrix)), rtol=1e-5, atol=1e-6)


def test_every_norm_of_the_trainer_is_taken_here():
    """No other module sums up squares in torch by itself: a foreach or vector norm elsewhere is the same mistake
    again."""
    found = [
        f"{path.name}:{number}"
        for path in sorted(Path(trainer.__path__[0]).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if path.name != "tensor_norms.py" and any(sign in line for sign in ("_foreach_norm", "vector_norm"))
    ]
    assert found == []


@pytest.mark.gpu
def test_a_gpu_adds_up_in_float64_too():
    tensor = torch.full((20_000_000,), 0.1)
    for dtype in (torch.float32, torch.bfloat16):
        on_gpu = tensor.to("cuda", dtype)
        assert float(squared_norms([on_gpu])[0].sqrt()) == pytest.approx(exact(on_gpu.cpu()), rel=1e-6)
