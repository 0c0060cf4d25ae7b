"""Catches which experts a mixture-of-experts model chose, through hooks on its routers. It knows no request."""

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.errors import UserError

Experts = NDArray[np.uint8] | NDArray[np.uint16]


class RoutingCapture:
    """The experts chosen in the newest forward pass, one entry a MoE block, in the order of the blocks."""

    def __init__(self, model: nn.Module, num_experts: int, top_k: int) -> None:
        """Hook every router of `model`.

        Raises:
            UserError: it has none.
        """
        self.dtype = np.uint8 if num_experts <= 256 else np.uint16
        self._num_experts, self._top_k = num_experts, top_k
        self._chosen: list[Tensor] = []
        gates = [getattr(block, "gate", None) for block in model.modules() if hasattr(block, "experts")]
        routers = [gate for gate in gates if isinstance(gate, nn.Module)]
        if not routers:
            raise UserError(f"got engine.return_routing = true, but {type(model).__name__} has no router that the torch engine finds; set it to false")
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

    def _catch(self, _module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        """A router answers with its choice, or with logits from which the choice is the top k."""
        parts = output if isinstance(output, tuple) else (output,)
        for part in parts:
            if not part.is_floating_point() and part.shape[-1] == self._top_k:
                self._chosen.append(part.reshape(-1, self._top_k))
                return
        logits = next(part for part in parts if part.shape[-1] == self._num_experts)
        self._chosen.append(logits.reshape(-1, self._num_experts).float().topk(self._top_k, dim=-1).indices)


def routing_of(model: nn.Module, config: object) -> RoutingCapture:
    """Hooks for a model with the usual names of its expert counts.

    Raises:
        UserError: the config names no experts.
    """
    for experts, top_k in (("num_experts", "num_experts_per_tok"), ("num_local_experts", "num_experts_per_tok"), ("n_routed_experts", "num_experts_per_tok")):
        if isinstance(getattr(config, experts, None), int) and isinstance(getattr(config, top_k, None), int):
            return RoutingCapture(model, getattr(config, experts), getattr(config, top_k))
    raise UserError(f"got engine.return_routing = true, but the model ({type(model).__name__}) is not a mixture of experts; set it to false")
