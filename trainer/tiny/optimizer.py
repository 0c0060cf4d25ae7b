"""An optimizer for short warm starts of small models: orthogonalised momentum for matrices. It knows no task."""

from collections.abc import Sequence

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 4


class OrthogonalMomentum:
    """Steps along the nearest orthogonal matrix of a Nesterov momentum, so that all directions of a matrix learn alike.

    Matrices are the last two dimensions; a stack of experts is a batch of matrices.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).
    """

    def __init__(self, parameters: Sequence[Tensor], momentum: float = 0.95) -> None:
        self._parameters, self._momentum = list(parameters), momentum
        self._buffers = [torch.zeros_like(parameter) for parameter in self._parameters]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Move every parameter against its gradient; an update's spectral norm is about `learning_rate`."""
        for parameter, buffer in zip(self._parameters, self._buffers, strict=True):
            if parameter.grad is None:
                continue
            buffer.lerp_(parameter.grad, 1 - self._momentum)
            direction = _orthogonal(parameter.grad.lerp(buffer, self._momentum))
            rows, columns = parameter.shape[-2:]
            parameter.add_(direction, alpha=-learning_rate * max(1.0, rows / columns) ** 0.5)


def _orthogonal(matrix: Tensor) -> Tensor:
    """[..., R, C] -> about U V^T of its singular value decomposition, by Newton-Schulz iterations."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.transpose(-2, -1) if tall else matrix
    wide = wide / (wide.square().sum(dim=(-2, -1), keepdim=True).sqrt() + 1e-7)
    linear, cubic, quintic = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = wide @ wide.transpose(-2, -1)
        wide = linear * wide + (cubic * gram + quintic * gram @ gram) @ wide
    return wide.transpose(-2, -1) if tall else wide
