"""What must be computed to score trajectories: prefixes under one policy each, packed into right-padded batches. Numpy
only; it knows no model."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import EngineTag, RoutingTrace, Trajectory, VersionSpan
from rollout.types.weights import PolicyVersion
from trainer.consistency.checks.routing import AnyExperts, flat_routing
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.types.support import Support, Truncation, support_of


@dataclass(frozen=True, slots=True, order=True)
class Sampler:
    """The distribution that log-probs belong to."""

    temperature: float = 1.0
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""

    @classmethod
    def of(cls, tag: EngineTag, options: ScoreOptions) -> "Sampler":
        """What `options` ask for a trajectory of `tag`."""
        temperature = tag.temperature if options.temperature is None else options.temperature
        top_p = tag.top_p if options.top_p is None else options.top_p
        top_k = tag.top_k if options.top_k is None else options.top_k
        return cls(temperature, top_p, top_k) if options.truncate else cls(temperature)

    @property
    def truncates(self) -> bool:
        """Whether some tokens are out of reach."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRow:
    """Inputs [start, end) of one trajectory, and the tokens that they shall predict. A start above 0 continues over a
    cache of the inputs before it."""

    index: int
    """Which trajectory."""
    trajectory: Trajectory
    start: int
    end: int
    targets: NDArray[np.int64]
    """[n] positions of scored tokens, rising, all in [start + 1, end]."""

    @property
    def length(self) -> int:
        """Inputs."""
        return self.end - self.start

    @property
    def trace(self) -> RoutingTrace | None:
        """The experts that the engine chose for these inputs."""
        whole, part = self.trajectory.routing, slice(self.start, self.end)
        return None if whole is None else RoutingTrace(experts=whole.experts[part], covered=whole.covered[part])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreBatch:
    """Right-padded rows; causal attention needs no padding mask, since real tokens only look left."""

    rows: tuple[ScoreRow, ...]
    token_ids: NDArray[np.int64]
    """[B, T]"""
    positions: NDArray[np.int64]
    """[N] flat positions of `token_ids` whose predictions are scored, row by row."""
    targets: NDArray[np.int64]
    """[N] ids of the tokens that they shall predict."""


def prefix_rows(
    index: int, trajectory: Trajectory, spans: Sequence[tuple[VersionSpan, PolicyVersion]]
) -> dict[PolicyVersion, ScoreRow]:
    """One row a policy: the prefix up to the policy's last token, computed anew. A span at position 0 has nothing to be
    predicted from there."""
    positions: dict[PolicyVersion, list[NDArray[np.int64]]] = {}
    for span, policy in spans:
        positions.setdefault(policy, []).append(np.arange(max(1, span.start), span.end))
    rows: dict[PolicyVersion, ScoreRow] = {}
    for policy, parts in positions.items():
        targets = np.concatenate(parts)
        if targets.size:
            rows[policy] = ScoreRow(index=index, trajectory=trajectory, start=0, end=int(targets[-1]), targets=targets)
    return rows


def generations(spans: Sequence[tuple[VersionSpan, PolicyVersion]]) -> list[list[tuple[VersionSpan, PolicyVersion]]]:
    """Spans of one generation each: those that follow each other without given tokens in between."""
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(spans), start=1) if a[0].end != b[0].start), len(spans)]
    return [list(spans[a:b]) for a, b in pairwise(cuts) if a < b]


def continued_rows(
    index: int, trajectory: Trajectory, generation: Sequence[tuple[VersionSpan, PolicyVersion]]
) -> list[tuple[PolicyVersion, ScoreRow]]:
    """One row a span: input p - 1 is read by the weights that sampled token p, over the cache that the rows before it
    left."""
    rows: list[tuple[PolicyVersion, ScoreRow]] = []
    start = 0
    for span, policy in generation:
        end = span.end - 1
        if end > start:
            targets = np.arange(max(1, span.start), span.end)
            rows.append((policy, ScoreRow(index=index, trajectory=trajectory, start=start, end=end, targets=targets)))
        start = end
    return rows


def batches_of(rows: Sequence[ScoreRow], batch_tokens: int) -> list[ScoreBatch]:
    """All rows, those of like length together, longest first, with rows x longest <= `batch_tokens` (one longer row
    makes its own)."""
    batches: list[list[ScoreRow]] = []
    for row in sorted(rows, key=lambda row: -row.length):
        if batches and (len(batches[-1]) + 1) * batches[-1][0].length <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [padded(batch) for batch in batches]


def padded(rows: Sequence[ScoreRow]) -> ScoreBatch:
    """One batch of `rows`."""
    width = max(row.length for row in rows)
    token_ids = np.zeros((len(rows), width), dtype=np.int64)
    for line, row in zip(token_ids, rows, strict=True):
        line[: row.length] = row.trajectory.token_ids[row.start : row.end]
    return ScoreBatch(
        rows=tuple(rows),
        token_ids=token_ids,
        positions=np.concatenate([row.targets - (1 + row.start - width * line) for line, row in enumerate(rows)]),
        targets=np.concatenate([row.trajectory.token_ids[row.targets] for row in rows]).astype(np.int64),
    )


def batch_support(batch: ScoreBatch, sampler: Sampler, *, listed: bool) -> Support | None:
    """The support of the batch's targets under `sampler`; None where it reaches everything.

    Args:
        listed: whether ids that the engine listed take part; not where another sampler than its own is asked about.
    """
    if not sampler.truncates:
        return None
    return support_of(
        [
            (
                Truncation(
                    top_p=sampler.top_p, top_k=sampler.top_k, supports=row.trajectory.supports if listed else None
                ),
                row.targets,
            )
            for row in batch.rows
        ]
    )


def batch_routing(
    batch: ScoreBatch, num_experts: int, cell: tuple[int, int]
) -> tuple[AnyExperts, NDArray[np.bool_]] | None:
    """The routing of the rows' traces, in the order of `token_ids`; None when no row has a trace. Arguments and errors
    as of `flat_routing`."""
    traces = [(row.trajectory.trajectory_id, row.trace) for row in batch.rows]
    if all(trace is None for _, trace in traces):
        return None
    return flat_routing(traces, width=batch.token_ids.shape[1], num_experts=num_experts, cell=cell)
