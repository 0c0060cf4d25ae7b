"""Catches which experts a mixture-of-experts model chose, through hooks on its routers. It knows no request."""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engines.torch.moe_routers import RouterOutput, chosen_experts, expert_counts, find_routers, read_answer
from rollout.errors import UserError

Experts = NDArray[np.uint8] | NDArray[np.uint16]


class RoutingCapture:
    """The experts chosen in the newest forward pass, one entry a MoE block, in the order of the blocks."""

    def __init__(self, model: nn.Module, config: object) -> None:
        """Hook every router of `model`, whose config counts its experts under the usual names.

        Raises:
            UserError: the config names no experts, or the model has no router.
        """
        counts, routers = expert_counts(config), find_routers(model)
        if counts is None or not routers:
            trouble = "is not a mixture of experts" if counts is None else "has no router that the torch engine finds"
            raise UserError(
                f"got engine.return_routing = true, but the model ({type(model).__name__}) {trouble}; set it to false"
            )
        self._num_experts, self._top_k = counts
        self.dtype = np.uint8 if self._num_experts <= 256 else np.uint16
        self._chosen: list[Tensor] = []
        for router in routers:
            router.register_forward_hook(self._catch)

    def take(self, batch: int) -> Experts:
        """[B, T, blocks, top_k] of the newest forward pass, which had B rows; forgets it."""
        stacked = torch.stack(self._chosen, dim=1)
        self._chosen.clear()
        return cast(Experts, stacked.view(batch, -1, *stacked.shape[1:]).cpu().numpy().astype(self.dtype))

    def clear(self) -> None:
        """Forget passes whose routing nobody wants."""
        self._chosen.clear()

    def _catch(self, _module: nn.Module, _args: object, output: RouterOutput) -> None:
        self._chosen.append(chosen_experts(read_answer(output, self._num_experts, self._top_k), self._top_k))
