"""From this rank's micro-batches to an applied update, or to the reason why there is none. It knows no group, no file and no version.

    (forward, backward) a micro-batch -> sums over ranks -> norms, unclipped -> clip, update
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from trainer.batch_replay import BatchReplay
from trainer.batcher import TrainingBatch
from trainer.optimizer import OptimizerReport, PolicyOptimizer
from trainer.policy_loss import SUMS, loss_tokens
from trainer.policy_model import PolicyModel
from trainer.ranks import Ranks
from trainer.stability.gradient_probe import TokenLoss
from trainer.types import MicroBatch

TOTALS = (*SUMS, "routing_expected", "routing_replayed")
"""What ranks sum up in a step; of a replay, the inputs that predict something and those of them that ran on the engine's experts."""


class PhaseClock:
    """Seconds of consecutive phases."""

    def __init__(self) -> None:
        self._last = perf_counter()
        self.phases: list[tuple[str, float]] = []

    def end(self, phase: str) -> None:
        """The phase that began when the one before ended is over."""
        now = perf_counter()
        self.phases.append((phase, now - self._last))
        self._last = now


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReport:
    """What `GradientStep.run` did; the same on all ranks."""

    totals: dict[str, float]
    """`TOTALS`, over all ranks."""
    optimizer: OptimizerReport


class GradientStep:
    """One rank's part; every method is collective."""

    def __init__(self, model: PolicyModel, loss: TokenLoss, optimizer: PolicyOptimizer, ranks: Ranks, replay: BatchReplay | None) -> None:
        self._model, self._loss, self._optimizer, self._ranks, self._replay = model, loss, optimizer, ranks, replay

    def run(self, step: int, micro_batches: Sequence[MicroBatch], batch: TrainingBatch, clock: PhaseClock) -> GradientReport:
        """Compute the gradient of `micro_batches` and apply it as optimizer step `step` (from 1)."""
        totals = self._forward_backward(micro_batches, batch)
        norms = self._optimizer.measure()
        clock.end("forward_backward")
        optimizer = self._optimizer.apply(step, norms) if batch.num_tokens else self._optimizer.drop(step, norms)
        clock.end("optimizer")
        return GradientReport(totals=totals, optimizer=optimizer)

    def _forward_backward(self, micro_batches: Sequence[MicroBatch], batch: TrainingBatch) -> dict[str, float]:
        """Add the gradients of this rank's micro-batches; returns `TOTALS` of all ranks."""
        sums = torch.zeros(len(TOTALS), dtype=torch.float64, device=self._ranks.device)
        for micro in micro_batches:
            with self._context(micro) as (expected, replayed):
                loss, added = self._loss(self._model, loss_tokens(micro, self._ranks.device), batch.temperature, batch.old_logprob_source)
                loss.backward()  # pyright: ignore[reportUnknownMemberType]
            sums += torch.cat((added, added.new_tensor((expected, replayed))))
        totals: list[float] = cast(Any, self._ranks.sum(cast(Tensor, sums))).tolist()
        return dict(zip(TOTALS, totals, strict=True))

    def _context(self, micro: MicroBatch) -> AbstractContextManager[tuple[int, int]]:
        """Forward and backward of a micro-batch run inside it; yields what it adds to the last two of `TOTALS`."""
        return nullcontext((0, 0)) if self._replay is None else self._replay.using(micro)
