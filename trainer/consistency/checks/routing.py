"""Agreement of two routings of the same tokens: the experts that the rollout engine chose and those that the trainer
chooses. Numpy only.

It owns the numbers and the completeness of the evidence; it knows no model, no verdict and no threshold. Experts are
compared as sets, since the order in which an engine names them means nothing.

A *cell* is one block of one row; row p belongs to input p, which predicts p + 1. A cell that names an expert twice or
one that does not exist is *hollow*: somebody padded. A row is compared when it is covered and none of its cells is
hollow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import UserError
from rollout.types.trajectory import RoutingTrace

AnyExperts = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingAgreement:
    """Sums over rows, and fractions in [0, 1] of them. Where no row was compared the fractions are NaN: absent evidence
    is no agreement, so look at `num_rows` first."""

    num_rows: int
    """Rows compared."""
    num_predicting: int
    """Rows that predict a sampled token: those whose routing the log-probs depend on directly."""
    num_predicting_compared: int
    """How many of these were compared."""
    hollow_cells: NDArray[np.int64]
    """[blocks] hollow cells of covered rows."""
    differing_cells: NDArray[np.int64]
    """[blocks] compared cells whose two sets differ."""
    jaccard_sums: NDArray[np.float64]
    """[blocks] |intersection| / |union|, added up over the rows."""
    differing_rows: int
    """Rows whose sets differ in some block; counted, never derived from the blocks: flips gather in some tokens."""
    gate_gap_sum: float | None
    """(Sets differ) x tanh(gap / 2), see `routing_agreement`, added up over the cells; None when no gap was given."""

    @property
    def coverage(self) -> float:
        """Rows compared of those that predict a sampled token; 1 when no token was sampled."""
        return self.num_predicting_compared / self.num_predicting if self.num_predicting else 1.0

    @property
    def block_mismatch(self) -> NDArray[np.float64]:
        """[blocks] fraction of rows whose two sets differ."""
        return self.differing_cells / (self.num_rows or math.nan)

    @property
    def mismatch(self) -> float:
        """Fraction of cells whose sets differ."""
        return int(self.differing_cells.sum()) / (self._num_cells or math.nan)

    @property
    def jaccard(self) -> float:
        """Mean over the cells of |intersection| / |union|."""
        return float(self.jaccard_sums.sum()) / (self._num_cells or math.nan)

    @property
    def token_any_mismatch(self) -> float:
        """Fraction of rows whose sets differ in some block."""
        return self.differing_rows / (self.num_rows or math.nan)

    @property
    def gate_gap_mismatch(self) -> float | None:
        """The mismatch with each flip weighed by how certain the trainer's choice is: what near ties do not explain."""
        return None if self.gate_gap_sum is None else self.gate_gap_sum / (self._num_cells or math.nan)

    @property
    def _num_cells(self) -> int:
        """Compared."""
        return self.num_rows * self.hollow_cells.size


NOTHING_COMPARED = RoutingAgreement(
    num_rows=0,
    num_predicting=0,
    num_predicting_compared=0,
    hollow_cells=np.zeros(0, dtype=np.int64),
    differing_cells=np.zeros(0, dtype=np.int64),
    jaccard_sums=np.zeros(0),
    differing_rows=0,
    gate_gap_sum=None,
)
"""No row, of a model that is not known."""


def routing_agreement(
    rollout: AnyExperts,
    trainer: AnyExperts,
    *,
    covered: NDArray[np.bool_],
    predicting: NDArray[np.bool_],
    num_experts: int,
    gate_gap: NDArray[np.floating[Any]] | None = None,
) -> RoutingAgreement:
    """Compare two choices of experts.

    Args:
        rollout: [rows, blocks, top_k] as the engine reported them; what stands in rows that are not covered is ignored.
        trainer: [rows, blocks, top_k]
        covered: [rows] True where the engine reported.
        predicting: [rows] True where the next token was sampled (`sampled[1:]` of a trajectory).
        num_experts: experts a block.
        gate_gap: [rows, blocks] the trainer's router logit of rank top_k minus that of the next, at least 0. A flip
            counts tanh(gap / 2) = (p - q) / (p + q) with p and q the router's probabilities of these two: 0 for a tie
            that any rounding turns over, 1 for a certain choice. So the gap-weighted mismatch is at most the plain one,
            and the difference is what near ties explain.

    Raises:
        ValueError: shapes differ, or a gap of a compared row is negative or NaN.

    Source: golden vector V13_routing.
    """
    _check_shapes(rollout, trainer, covered, predicting, gate_gap)
    complete = complete_cells(rollout, num_experts)
    rows = covered & complete.all(axis=1)
    theirs, ours, top_k = rollout[rows], trainer[rows], rollout.shape[2]
    shared = np.zeros(theirs.shape[:2], dtype=np.int64)
    for rank in range(top_k):
        shared += (theirs[:, :, rank, None] == ours).any(axis=2)
    differs = shared < top_k
    return RoutingAgreement(
        num_rows=int(rows.sum()),
        num_predicting=int(predicting.sum()),
        num_predicting_compared=int((predicting & rows).sum()),
        hollow_cells=(covered[:, None] & ~complete).sum(axis=0),
        differing_cells=differs.sum(axis=0),
        jaccard_sums=(shared / (2 * top_k - shared)).sum(axis=0),
        differing_rows=int(differs.any(axis=1).sum()),
        gate_gap_sum=None if gate_gap is None else float((differs * _certainty(gate_gap[rows])).sum()),
    )


def merge_agreements(parts: Sequence[RoutingAgreement]) -> RoutingAgreement:
    """The agreement over all rows of `parts` (segments, trajectories); the gap-weighted mismatch is None unless every
    part with rows has one.

    Raises:
        ValueError: there are no parts, or they have different numbers of blocks.
    """
    blocks = {part.hollow_cells.size for part in parts}
    if len(blocks) != 1:
        raise ValueError(
            f"got {len(parts)} agreements over {sorted(blocks)} blocks; expected at least one, and one number of blocks"
        )
    weighted = [part.gate_gap_sum for part in parts if part.num_rows]
    known = [weight for weight in weighted if weight is not None]
    return RoutingAgreement(
        num_rows=sum(part.num_rows for part in parts),
        num_predicting=sum(part.num_predicting for part in parts),
        num_predicting_compared=sum(part.num_predicting_compared for part in parts),
        hollow_cells=np.sum([part.hollow_cells for part in parts], axis=0),
        differing_cells=np.sum([part.differing_cells for part in parts], axis=0),
        jaccard_sums=np.sum([part.jaccard_sums for part in parts], axis=0),
        differing_rows=sum(part.differing_rows for part in parts),
        gate_gap_sum=sum(known) if len(known) == len(weighted) else None,
    )


def complete_cells(experts: AnyExperts, num_experts: int) -> NDArray[np.bool_]:
    """[rows, blocks] True where the cell of [rows, blocks, top_k] names top_k different experts below `num_experts`."""
    ranked = np.sort(experts, axis=2)
    distinct = (ranked[:, :, 1:] != ranked[:, :, :-1]).all(axis=2)
    return distinct & (ranked[:, :, 0] >= 0) & (ranked[:, :, -1] < num_experts)


def flat_routing(
    traces: Sequence[tuple[str, RoutingTrace | None]], *, width: int, num_experts: int, cell: tuple[int, int]
) -> tuple[AnyExperts, NDArray[np.bool_]]:
    """Lay the traces of B right-padded rows of `width` inputs behind one another, for a replay.

    Returns:
        Experts [B*T, blocks, top_k], 0 where not covered; and [B*T] where a row is covered. Padding, and rows whose
        evidence is missing or hollow, are not: they run on native routing.

    Args:
        traces: [B] id of the trajectory and the trace of a row's first inputs; None where the engine reported none.
        width: T.
        num_experts: experts a block; hollow rows are not covered.
        cell: (blocks, top_k) of the model.

    Raises:
        UserError: a trace has other blocks or another top_k.
    """
    experts = np.zeros((len(traces), width, *cell), dtype=np.uint8 if num_experts <= 256 else np.int32)
    covered = np.zeros((len(traces), width), dtype=np.bool_)
    for row, (trajectory_id, trace) in enumerate(traces):
        if trace is None:
            continue
        if trace.experts.shape[1:] != cell:
            raise UserError(
                f"trajectory {trajectory_id} has routing {trace.experts.shape}; expected [tokens - 1, {cell[0]} blocks,"
                f" top_k {cell[1]}]: engine and trainer run different models, or the engine reports other blocks; turn "
                "trainer.replay_routing off"
            )
        usable = trace.covered & complete_cells(trace.experts, num_experts).all(axis=1)
        experts[row, : usable.size][usable] = trace.experts[usable]
        covered[row, : usable.size] = usable
    return experts.reshape(-1, *cell), covered.reshape(-1)


def _certainty(gate_gap: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    if not (gate_gap >= 0).all():
        raise ValueError(
            "a gate gap is negative or NaN; expected the logit of rank top_k minus that of the next, from finite logits"
        )
    return np.tanh(gate_gap.astype(np.float64) / 2)


def _check_shapes(
    rollout: AnyExperts,
    trainer: AnyExperts,
    covered: NDArray[np.bool_],
    predicting: NDArray[np.bool_],
    gate_gap: NDArray[np.floating[Any]] | None,
) -> None:
    if (
        rollout.ndim != 3
        or trainer.shape != rollout.shape
        or not covered.shape == predicting.shape == rollout.shape[:1]
    ):
        got = f"experts {rollout.shape} and {trainer.shape}, covered {covered.shape}, predicting {predicting.shape}"
        raise ValueError(f"got {got}; expected [rows, blocks, top_k] twice and [rows] twice")
    if gate_gap is not None and gate_gap.shape != rollout.shape[:2]:
        raise ValueError(f"got gate gaps {gate_gap.shape}; expected [rows, blocks] = {rollout.shape[:2]}")
