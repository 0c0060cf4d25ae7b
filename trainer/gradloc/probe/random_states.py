"""Torch's random state, taken and put back. Layer 3 of diagnosis; it knows no model."""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

_torch: Any = torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RandomState:
    """Random state of the CPU, and of the device where it is a GPU."""

    cpu: Tensor
    device: Tensor | None

    @classmethod
    def take(cls, device: torch.device) -> "RandomState":
        return cls(
            cpu=cast(Tensor, _torch.get_rng_state()),
            device=_torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def put_back(self, device: torch.device) -> None:
        _torch.set_rng_state(self.cpu)
        if self.device is not None:
            _torch.cuda.set_rng_state(self.device, device)
