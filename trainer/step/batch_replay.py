"""Replays the engine's experts in the forward and backward pass of a micro-batch, and counts how much of it they cover.
It knows no loss and no rank."""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engines.torch.moe_routers import expert_counts, find_routers
from rollout.errors import UserError
from trainer.consistency.checks.routing import AnyExperts, flat_routing
from trainer.model.policy_model import PolicyModel
from trainer.model.routing_replay import RoutingReplay
from trainer.types.step import MicroBatch


class BatchReplay:
    """One a model, sharded or not."""

    def __init__(self, model: PolicyModel) -> None:
        """Hook the routers of `model`.

        Raises:
            UserError: it is no mixture of experts.
        """
        counts = expert_counts(model.text_config)
        if counts is None:
            raise UserError(
                f"got trainer.replay_routing = true, but {model.architecture} is not a mixture of experts; set it to "
                "false, or train a mixture of experts"
            )
        self._hooks = RoutingReplay(model.causal_lm, *counts)
        self._num_experts, self._cell = counts[0], (len(find_routers(model.causal_lm)), counts[1])

    @contextmanager
    def using(self, micro: MicroBatch) -> Generator[tuple[int, int]]:
        """Forward and backward of `micro` run inside, with the experts of its traces where they are there; all else
        stays native.

        Yields:
            Inputs that predict something, and how many of them run on the engine's experts.

        Raises:
            UserError: a trace has other blocks or another top_k, so engine and trainer run different models; or the
                routers' gates are no softmax.
        """
        experts, covered = flat_routing(
            list(zip(micro.trajectory_ids, micro.routing, strict=True)),
            width=micro.token_ids.shape[1] - 1,
            num_experts=self._num_experts,
            cell=self._cell,
        )
        with self._hooks.using(_tensor(experts), _tensor(covered)):
            yield sum(max(length - 1, 0) for length in micro.lengths), int(np.count_nonzero(covered))


def _tensor(array: AnyExperts | NDArray[np.bool_]) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
