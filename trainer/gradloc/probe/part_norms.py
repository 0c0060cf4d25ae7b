"""The norm of each rank's part of each micro-batch, taken while backward has it whole, so that a search needs no pass
for it. Layer 3 of diagnosis.

Backward leaves the gradient of this rank and this micro-batch on the gathered parameter, for the moment before FSDP2
reduces and scatters it; a hook on the parameter reads it there. That holds on any number of ranks, one included. It
knows no search and no loss.
"""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from rollout.errors import UserError
from trainer.model.ranks import Ranks
from trainer.model.tensor_norms import squared_norms


class PartNorms:
    """One rank's part; silent outside `recording`."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        """Hook every parameter of a sharded model, in its first forward pass: only there are they gathered."""
        self._ranks = ranks
        self._hooked: dict[int, Tensor] = {}
        self._waiting: list[list[Tensor]] = []
        self._seen: list[Tensor] | None = None
        self._squares: dict[int, Tensor] = {}
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                handles = list[RemovableHandle]()
                handles.append(unit.register_forward_pre_hook(partial(self._find, handles)))

    @contextmanager
    def recording(self, micro_batch: int) -> Generator[None]:
        """The backward pass of this micro-batch of the step runs inside; a second one in its place counts instead of
        the first.

        Raises:
            UserError: gradients of an earlier micro-batch are still there, unreduced, and would be measured with it.
        """
        if any(parameter.grad is not None for parameter in self._hooked.values()):
            raise UserError(
                "got gradients of an earlier micro-batch that were not reduced; a search needs those of each "
                "micro-batch: leave out set_requires_gradient_sync(False), or hand over no record"
            )
        self._seen = []
        try:
            yield
            for waiting in self._waiting:
                self._measure(waiting)  # of units some of whose parameters had no part in this pass
            none = torch.zeros(1, dtype=torch.float64, device=self._ranks.device)
            self._squares[micro_batch] = torch.cat([none, *self._seen]).sum()
        finally:
            self._seen = None
            for waiting in self._waiting:
                waiting.clear()

    def forget(self) -> None:
        self._squares.clear()

    def values(self, num_micro_batches: int) -> NDArray[np.float64]:
        """[M, W] norms of the step's first M micro-batches, all of them recorded. Collective."""
        table = torch.zeros((num_micro_batches, self._ranks.world), dtype=torch.float64, device=self._ranks.device)
        table[:, self._ranks.rank] = torch.stack([self._squares[number] for number in range(num_micro_batches)])
        return cast(Any, self._ranks.sum(table)).sqrt().cpu().numpy()

    def _find(self, handles: list[RemovableHandle], unit: nn.Module, _args: object) -> None:
        """The unit's parameters are gathered now, and the objects stay the same from here on."""
        found = [
            p for p in unit.parameters() if p.requires_grad and not isinstance(p, DTensor) and id(p) not in self._hooked
        ]
        waiting: list[Tensor] = []
        self._waiting.append(waiting)
        for parameter in found:
            self._hooked[id(parameter)] = parameter
            cast(Any, parameter).register_post_accumulate_grad_hook(partial(self._see, waiting, len(found)))
        handles.pop().remove()

    def _see(self, waiting: list[Tensor], whole: int, parameter: Tensor) -> None:
        """Measure the gradients of a unit together: they are reduced, and freed, together."""
        if self._seen is not None and parameter.grad is not None:
            waiting.append(parameter.grad)
            if len(waiting) == whole:
                self._measure(waiting)

    def _measure(self, waiting: list[Tensor]) -> None:
        if waiting and self._seen is not None:
            self._seen.append(squared_norms(waiting))
        waiting.clear()
