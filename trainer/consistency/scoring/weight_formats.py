"""The weights of a version in other number formats, for the question whether precision explains a gap. Pure torch."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainer.consistency.scoring.protocols import ScoreOptions

_FP8_MAX = 448.0
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def conversion(
    causal_lm: nn.Module, options: ScoreOptions, dtype: torch.dtype
) -> Callable[[str, Tensor], Tensor] | None:
    """What turns a named parameter into the one that `options` ask for; None where the parameters serve as they are.

    With `float8_e4m3` all matrices are rounded but the embedding and the head, which engines leave as they are; vectors
    (norms, biases) stay too. Activations are not rounded.

    Args:
        dtype: the trainer's compute dtype.
    """
    wanted = _DTYPES.get(options.dtype, dtype)
    rounds = options.weights_dtype == "float8_e4m3"
    if wanted == dtype and not rounds:
        return None
    matrices = _matrices(causal_lm) if rounds else frozenset[str]()
    return lambda name, tensor: (round_to_float8(tensor) if name in matrices else tensor).to(wanted)


def round_to_float8(matrix: Tensor) -> Tensor:
    """Values [..., rows, columns] on the e4m3 grid, in float32: one scale of amax / 448 a matrix, so each expert of a
    stack has its own."""
    values = matrix.float()
    scale = values.abs().amax(dim=(-2, -1), keepdim=True) / _FP8_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


def _matrices(causal_lm: nn.Module) -> frozenset[str]:
    head = cast(nn.Module, cast(Any, causal_lm).get_output_embeddings())
    modules = [head, *(module for module in causal_lm.modules() if isinstance(module, nn.Embedding))]
    spared = {id(parameter) for module in modules for parameter in module.parameters()}
    return frozenset(
        name for name, parameter in causal_lm.named_parameters() if parameter.ndim >= 2 and id(parameter) not in spared
    )
