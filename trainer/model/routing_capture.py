"""Records the trainer's own routing of a forward pass: which experts, and by what margin. It knows no trajectory and no
verdict.

What it records is the routers' native choice, also while `trainer.model.routing_replay` makes the blocks use another
one.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engines.torch.moe_routers import RouterOutput, chosen_experts, find_routers, read_answer
from rollout.errors import ConcordError, UserError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedRouting:
    """The routing of one forward pass; its rows are the B*T input positions, flat."""

    experts: NDArray[np.uint8] | NDArray[np.uint16]
    """[rows, blocks, top_k]"""
    gate_gap: NDArray[np.float32]
    """[rows, blocks] router logit of rank top_k minus that of rank top_k + 1; infinite where every expert is chosen."""


class RoutingRecorder:
    """Hooks on the routers; silent outside `recording`."""

    def __init__(self, model: nn.Module, num_experts: int, top_k: int) -> None:
        """Hook every router of `model`; the hooks stay, also through sharding.

        Raises:
            UserError: it has none.
        """
        self._num_experts, self._top_k = num_experts, top_k
        routers = find_routers(model)
        if not routers:
            raise UserError(
                f"{type(model).__name__} has no router to record; use a mixture of experts or leave its routing out"
            )
        self._num_blocks = len(routers)
        self._recording = False
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}
        for block, router in enumerate(routers):
            # In front, so that a replay's answer is not taken for the router's.
            router.register_forward_hook(partial(self._record, block), prepend=True)

    @contextmanager
    def recording(self) -> Generator[None]:
        """Record the forward pass inside; of several, the last."""
        self._blocks.clear()
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def take(self) -> RecordedRouting:
        """What the last `recording` saw; forgets it.

        Raises:
            ConcordError: a router did not run in it.
        """
        missing = sorted(set(range(self._num_blocks)) - self._blocks.keys())
        if missing:
            raise ConcordError(
                f"no routing of {len(missing)} of {self._num_blocks} MoE blocks (first {missing[0]}); run the whole "
                "model inside `recording`"
            )
        blocks = [self._blocks[block] for block in range(self._num_blocks)]
        self._blocks.clear()
        chosen = torch.stack([experts for experts, _ in blocks], dim=1).cpu().numpy()
        experts = chosen.astype(np.uint8) if self._num_experts <= 256 else chosen.astype(np.uint16)
        return RecordedRouting(experts=experts, gate_gap=torch.stack([gap for _, gap in blocks], dim=1).cpu().numpy())

    def _record(self, block: int, _router: nn.Module, _args: object, output: RouterOutput) -> None:
        if not self._recording:
            return
        answer = read_answer(output, self._num_experts, self._top_k)
        if answer.logits is None:
            raise UserError(
                f"MoE block {block}: the router gives no logits [rows, {self._num_experts}], so its margin is unknown; "
                "leave its routing out"
            )
        logits = answer.parts[answer.logits].detach().reshape(-1, self._num_experts).float()
        self._blocks[block] = chosen_experts(answer, self._top_k).detach(), gate_gap(logits, self._top_k)


def gate_gap(logits: Tensor, top_k: int) -> Tensor:
    """[rows] logit of rank `top_k` minus that of the next, from [rows, experts]; infinite where every expert is
    chosen."""
    if top_k == logits.shape[-1]:
        return torch.full(logits.shape[:-1], torch.inf, dtype=logits.dtype, device=logits.device)
    ranked = logits.topk(top_k + 1, dim=-1).values
    return ranked[..., -2] - ranked[..., -1]
