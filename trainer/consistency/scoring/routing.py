"""Listens to the routers while batches are scored, and compares what they chose with the traces of the rows. It knows
no weights and no verdict.

Row p of input p counts where the batch scores token p + 1, so under the version that sampled that token: rows that
predict given tokens belong to no version and are left out. One forward pass's routing is held at a time; what stays is
numbers.
"""

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
from torch import nn

from rollout.engines.torch.moe_routers import find_routers
from rollout.types.trajectory import RoutingTrace
from trainer.consistency.checks.routing import RoutingAgreement, merge_agreements, routing_agreement
from trainer.consistency.scoring.rows import ScoreBatch, ScoreRow
from trainer.model.routing_capture import RecordedRouting, RoutingRecorder


class RoutingListener:
    """One a model; used for one call of the scorer after the other."""

    def __init__(self, model: nn.Module, num_experts: int, top_k: int) -> None:
        """Listen to the routers of `model`.

        Raises:
            UserError: it has none.
        """
        self._recorder = RoutingRecorder(model, num_experts, top_k)
        self._num_experts, self._cell = num_experts, (len(find_routers(model)), top_k)
        self._parts: dict[int, list[RoutingAgreement]] = {}

    @contextmanager
    def listening(self, batch: ScoreBatch) -> Generator[None]:
        """The forward pass of `batch` runs inside; without a trace in it, nothing is recorded.

        Raises:
            UserError: a router returns no logits, so there is no margin.
        """
        if all(row.trajectory.routing is None for row in batch.rows):
            yield
            return
        with self._recorder.recording():
            yield
        native, width = self._recorder.take(), batch.token_ids.shape[1]
        for line, row in enumerate(batch.rows):
            if row.trajectory.routing is not None:
                self._parts.setdefault(row.index, []).append(
                    self._compare(row, row.trajectory.routing, native, line * width)
                )

    def take(self, count: int) -> list[RoutingAgreement | None]:
        """The agreement of each of `count` trajectories since the last call; None where none of its tokens was scored,
        or no trace came with it."""
        parts, self._parts = self._parts, {}
        return [merge_agreements(parts[index]) if index in parts else None for index in range(count)]

    def _compare(self, row: ScoreRow, trace: RoutingTrace, native: RecordedRouting, first: int) -> RoutingAgreement:
        """A trace of other blocks or another top_k says nothing about this model: none of its rows is covered. Rows
        without a margin (NaN) are left out."""
        known = ~np.isnan(native.gate_gap[first + row.targets - 1 - row.start]).any(axis=1)
        inputs = row.targets[known] - 1
        here = first + inputs - row.start
        ours, gate_gap = native.experts[here], native.gate_gap[here]
        if trace.experts.shape[1:] == self._cell:
            theirs, covered = trace.experts[inputs], trace.covered[inputs]
        else:
            theirs, covered = np.zeros_like(ours), np.zeros(inputs.size, dtype=np.bool_)
        predicting = np.ones(inputs.size, dtype=np.bool_)
        return routing_agreement(
            theirs, ours, covered=covered, predicting=predicting, num_experts=self._num_experts, gate_gap=gate_gap
        )
