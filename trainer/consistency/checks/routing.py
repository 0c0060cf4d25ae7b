"""Agreement of two routings of the same tokens: the experts that the rollout engine chose and those that the trainer
chooses. Numpy only.

It owns the numbers and the completeness of the evidence; it knows no model, no verdict and no threshold. Experts are
compared as sets, since the order in which an engine names them means nothing; the ordered mismatch is there to compare
with tools that do otherwise.

A *cell* is one block of one row; row p belongs to input p, which predicts p + 1. A cell that names an expert twice or
one that does not exist is *hollow*: somebody padded. A row is compared when it is covered and none of its cells is
hollow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import RoutingTrace

AnyExperts = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingAgreement:
    """Fractions lie in [0, 1]. Where no row was compared they are NaN: absent evidence is no agreement, so look at
    `num_rows` first."""

    num_rows: int
    """Rows compared."""
    num_predicting: int
    """Rows that predict a sampled token: those whose routing the log-probs depend on directly."""
    num_predicting_compared: int
    """Of these, how many were compared."""
    hollow_cells: NDArray[np.int64]
    """[blocks] hollow cells of covered rows."""
    block_mismatch: NDArray[np.float64]
    """[blocks] fraction of rows whose two sets differ."""
    block_jaccard: NDArray[np.float64]
    """[blocks] mean of |intersection| / |union|."""
    token_any_mismatch: float
    """Fraction of rows whose sets differ in some block; counted, never derived from `block_mismatch`: flips gather in
    some tokens."""
    expert_overlap: float
    """Mean over the cells of |intersection| / top_k."""
    ordered_mismatch: float
    """Fraction of cells whose lists differ, order included."""
    gate_gap_mismatch: float | None
    """Mean over the cells of (sets differ) x tanh(gap / 2), see `routing_agreement`; None when no gap was given."""

    @property
    def coverage(self) -> float:
        """Rows compared of those that predict a sampled token; 1 when no token was sampled."""
        return self.num_predicting_compared / self.num_predicting if self.num_predicting else 1.0

    @property
    def mismatch(self) -> float:
        """Fraction of cells whose sets differ."""
        return float(self.block_mismatch.mean())

    @property
    def jaccard(self) -> float:
        """Mean over the cells."""
        return float(self.block_jaccard.mean())

    @property
    def route_distance(self) -> float:
        """D_route: mean over the cells of the fraction of a token's experts that are others."""
        return 1.0 - self.expert_overlap


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
    theirs, ours = rollout[rows], trainer[rows]
    top_k = rollout.shape[2]
    shared = np.zeros(theirs.shape[:2], dtype=np.int64)
    for rank in range(top_k):
        shared += (theirs[:, :, rank, None] == ours).any(axis=2)
    differs = shared < top_k
    weighted = None if gate_gap is None else differs * _certainty(gate_gap[rows])
    return RoutingAgreement(
        num_rows=int(rows.sum()),
        num_predicting=int(predicting.sum()),
        num_predicting_compared=int((predicting & rows).sum()),
        hollow_cells=np.count_nonzero(covered[:, None] & ~complete, axis=0).astype(np.int64),
        block_mismatch=_block_means(differs.astype(np.float64)),
        block_jaccard=_block_means(shared / (2 * top_k - shared)),
        token_any_mismatch=_mean(differs.any(axis=1)),
        expert_overlap=_mean(shared / top_k),
        ordered_mismatch=_mean((theirs != ours).any(axis=2)),
        gate_gap_mismatch=None if weighted is None else _mean(weighted),
    )


def merge_agreements(parts: Sequence[RoutingAgreement]) -> RoutingAgreement:
    """The agreement over all rows of `parts` (segments, trajectories); the gap-weighted mismatch is None unless every
    part with rows has one.

    Raises:
        ValueError: there are no parts, or they have different numbers of blocks.
    """
    blocks = {part.block_mismatch.size for part in parts}
    if len(blocks) != 1:
        raise ValueError(
            f"got {len(parts)} agreements over {sorted(blocks)} blocks; expected at least one, and one number of blocks"
        )
    counted = [part for part in parts if part.num_rows]
    weights = np.array([part.num_rows for part in counted], dtype=np.float64)

    def merged(values: list[float]) -> float:
        return float(np.average(values, weights=weights)) if values else float("nan")

    def merged_blocks(values: list[NDArray[np.float64]]) -> NDArray[np.float64]:
        return np.average(values, axis=0, weights=weights) if values else np.full(blocks.copy().pop(), np.nan)

    gaps = [part.gate_gap_mismatch for part in counted if part.gate_gap_mismatch is not None]
    return RoutingAgreement(
        num_rows=sum(part.num_rows for part in parts),
        num_predicting=sum(part.num_predicting for part in parts),
        num_predicting_compared=sum(part.num_predicting_compared for part in parts),
        hollow_cells=np.stack([part.hollow_cells for part in parts]).sum(axis=0).astype(np.int64),
        block_mismatch=merged_blocks([part.block_mismatch for part in counted]),
        block_jaccard=merged_blocks([part.block_jaccard for part in counted]),
        token_any_mismatch=merged([part.token_any_mismatch for part in counted]),
        expert_overlap=merged([part.expert_overlap for part in counted]),
        ordered_mismatch=merged([part.ordered_mismatch for part in counted]),
        gate_gap_mismatch=merged(gaps) if gaps and len(gaps) == len(counted) else None,
    )


def complete_cells(experts: AnyExperts, num_experts: int) -> NDArray[np.bool_]:
    """[rows, blocks] True where the cell of [rows, blocks, top_k] names top_k different experts below `num_experts`."""
    ranked = np.sort(experts, axis=2)
    distinct = (ranked[:, :, 1:] != ranked[:, :, :-1]).all(axis=2)
    return distinct & (ranked[:, :, 0] >= 0) & (ranked[:, :, -1] < num_experts)


def token_any_if_independent(block_mismatch: NDArray[np.float64]) -> float:
    """What the token-any mismatch would be if blocks [blocks] flipped independently; to set beside the counted one,
    never in its place."""
    return float(1.0 - np.prod(1.0 - block_mismatch))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatRouting:
    """The routing of a micro-batch for a replay: rows are its B*T input positions, flat."""

    experts: NDArray[np.uint8] | NDArray[np.int32]
    """[B*T, blocks, top_k], 0 where not covered."""
    covered: NDArray[np.bool_]
    """[B*T] False in padding, in the last position of a row, and where evidence is missing or hollow."""
    num_expected: int
    """Input positions of the batch's trajectories that predict something."""
    num_hollow: int
    """Of these, how many were covered but hollow."""

    @property
    def fallback(self) -> float:
        """Fraction of the expected rows that run on native routing; 0 when none is expected."""
        return 1.0 - float(self.covered.sum()) / self.num_expected if self.num_expected else 0.0


def flat_routing(
    traces: Sequence[RoutingTrace | None],
    lengths: Sequence[int],
    *,
    width: int,
    num_experts: int,
    cell: tuple[int, int],
) -> FlatRouting:
    """Lay the traces of B right-padded rows of `width` tokens behind one another.

    Args:
        traces: [B] one a row; None where the engine reported none: all of that row falls back.
        lengths: [B] tokens of each row, 0 for a filler.
        width: T.
        num_experts: experts a block; hollow rows fall back too, and are counted.
        cell: (blocks, top_k) of the model.

    Raises:
        ValueError: a trace has other blocks or another top_k, or does not fit its row.
    """
    narrow = num_experts <= 256
    shape = (len(traces), width, *cell)
    experts = np.zeros(shape, dtype=np.uint8) if narrow else np.zeros(shape, dtype=np.int32)
    covered = np.zeros((len(traces), width), dtype=np.bool_)
    num_hollow = 0
    for row, (trace, length) in enumerate(zip(traces, lengths, strict=True)):
        if trace is None:
            continue
        rows = trace.covered.size
        if trace.experts.shape[1:] != cell or rows != length - 1 or length > width:
            got = f"row {row} has routing {trace.experts.shape} for {length} tokens in {width} columns"
            raise ValueError(
                f"{got}; expected [tokens - 1, {cell[0]} blocks, top_k {cell[1]}], and no more tokens than columns"
            )
        usable = trace.covered & complete_cells(trace.experts, num_experts).all(axis=1)
        num_hollow += int(trace.covered.sum() - usable.sum())
        experts[row, :rows][usable] = trace.experts[usable]
        covered[row, :rows] = usable
    return FlatRouting(
        experts=experts.reshape(-1, *cell),
        covered=covered.reshape(-1),
        num_expected=sum(max(length - 1, 0) for length in lengths),
        num_hollow=num_hollow,
    )


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


def _mean(values: NDArray[np.bool_] | NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else float("nan")


def _block_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[blocks] over [rows, blocks]."""
    return np.array([_mean(column) for column in values.T], dtype=np.float64)
