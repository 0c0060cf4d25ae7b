"""Chosen token terms as micro-batches: only the rows in question, up to the last token in question. Layer 3 of
diagnosis; numpy only, it runs nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import RoutingTrace
from trainer.gradloc.probe.step_terms import StepTerms, Terms
from trainer.types.step import MicroBatch

FILLER = MicroBatch(
    token_ids=np.zeros((1, 2), dtype=np.int64),
    loss_mask=np.zeros((1, 2), dtype=np.bool_),
    old_logprobs=np.zeros((1, 2), dtype=np.float32),
    rollout_logprobs=np.zeros((1, 2), dtype=np.float32),
    advantages=np.zeros((1, 2), dtype=np.float32),
    token_weights=np.zeros(1, dtype=np.float32),
    trajectory_ids=("",),
    lengths=(0,),
    routing=(None,),
)
"""What a rank runs that has nothing in question: ranks gather and reduce together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """What one rank runs in one pass."""

    rows: MicroBatch
    """Its mask holds every token whose log-prob the loss needs."""
    chosen: NDArray[np.bool_] | None
    """[B, T] those of them whose terms are asked for; None where that is all."""
    source: int | None
    """The step's micro-batch that it is, where it must run whole; None for rows of several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsConfig:
    """How passes are laid out; the same on all ranks."""

    whole: bool
    """Run whole micro-batches, each under its own random state."""
    coupled: bool
    """A token's term depends on all loss tokens of its row."""
    cut: bool
    """Leave out rows and tokens that are not in question."""


@dataclass(frozen=True, slots=True)
class _Row:
    micro_batch: int
    row: int
    width: int


def num_passes(terms: Terms, table: StepTerms, config: RowsConfig) -> int:
    """Passes for these terms: the most that any rank needs."""
    if terms.size == 0:
        return 0
    if config.whole or not config.cut:
        return int(np.unique(table.micro_batch[terms]).size)
    return max(
        len(_packed(_rows_of(terms[table.rank[terms] == rank], table, config), table))
        for rank in np.unique(table.rank[terms])
    )


def rank_passes(terms: Terms, table: StepTerms, config: RowsConfig, rank: int, own: Sequence[MicroBatch]) -> list[Pass]:
    """What `rank` runs for these terms, `num_passes` in number.

    Args:
        own: the rank's micro-batches of the step.
    """
    mine = terms[table.rank[terms] == rank]
    chosen = {int(m): np.zeros(own[int(m)].loss_mask.shape, dtype=np.bool_) for m in np.unique(table.micro_batch[mine])}
    for micro_batch, mask in chosen.items():
        part = mine[table.micro_batch[mine] == micro_batch]
        mask[table.row[part], table.position[part]] = True
    if config.whole or not config.cut:
        return [_whole(int(m), chosen.get(int(m)), own, config) for m in np.unique(table.micro_batch[terms])]
    packed = [_cut(rows, chosen, own, config) for rows in _packed(_rows_of(mine, table, config), table)]
    filler = Pass(rows=FILLER, chosen=None, source=None)
    return packed + [filler] * (num_passes(terms, table, config) - len(packed))


def _whole(micro_batch: int, chosen: NDArray[np.bool_] | None, own: Sequence[MicroBatch], config: RowsConfig) -> Pass:
    if chosen is None:
        return Pass(rows=FILLER, chosen=None, source=None)
    micro = own[micro_batch]
    if config.coupled:
        return Pass(rows=micro, chosen=chosen, source=micro_batch)
    return Pass(rows=replace(micro, loss_mask=chosen), chosen=None, source=micro_batch)


def _rows_of(terms: Terms, table: StepTerms, config: RowsConfig) -> list[_Row]:
    """Rows that hold the terms, the widest first; a coupled row reaches to its last loss token."""
    widths: dict[tuple[int, int], int] = {}
    for m, row, position in zip(
        table.micro_batch[terms].tolist(), table.row[terms].tolist(), table.position[terms].tolist(), strict=True
    ):
        widths[m, row] = position + 1  # positions of a row rise
    if config.coupled and terms.size:
        rank = int(table.rank[terms[0]])
        for m, row in widths:
            whole = (table.micro_batch == m) & (table.rank == rank) & (table.row == row)
            widths[m, row] = int(table.position[whole].max()) + 1
    return sorted(
        (_Row(m, row, width) for (m, row), width in widths.items()), key=lambda r: (-r.width, r.micro_batch, r.row)
    )


def _packed(rows: list[_Row], table: StepTerms) -> list[list[_Row]]:
    """Runs of rows no larger than the step's largest micro-batch."""
    packs: list[list[_Row]] = []
    for row in rows:
        if packs and (len(packs[-1]) + 1) * packs[-1][0].width <= table.widest_tokens:
            packs[-1].append(row)
        else:
            packs.append([row])
    return packs


def _cut(rows: list[_Row], chosen: dict[int, NDArray[np.bool_]], own: Sequence[MicroBatch], config: RowsConfig) -> Pass:
    shape = (len(rows), rows[0].width)
    token_ids, mask, wanted = (
        np.zeros(shape, dtype=np.int64),
        np.zeros(shape, dtype=np.bool_),
        np.zeros(shape, dtype=np.bool_),
    )
    old, rollout, advantages = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    for index, row in enumerate(rows):
        micro, columns = own[row.micro_batch], slice(0, row.width)
        token_ids[index, columns] = micro.token_ids[row.row, columns]
        wanted[index, columns] = chosen[row.micro_batch][row.row, columns]
        mask[index, columns] = micro.loss_mask[row.row, columns] if config.coupled else wanted[index, columns]
        old[index, columns] = micro.old_logprobs[row.row, columns]
        rollout[index, columns] = micro.rollout_logprobs[row.row, columns]
        advantages[index, columns] = micro.advantages[row.row, columns]
    lengths = tuple(min(own[row.micro_batch].lengths[row.row], row.width) for row in rows)
    batch = MicroBatch(
        token_ids=token_ids,
        loss_mask=mask,
        old_logprobs=old,
        rollout_logprobs=rollout,
        advantages=advantages,
        token_weights=np.array([own[row.micro_batch].token_weights[row.row] for row in rows], dtype=np.float32),
        trajectory_ids=tuple(own[row.micro_batch].trajectory_ids[row.row] for row in rows),
        lengths=lengths,
        routing=tuple(
            _cut_routing(own[row.micro_batch].routing[row.row], length)
            for row, length in zip(rows, lengths, strict=True)
        ),
    )
    return Pass(rows=batch, chosen=wanted if config.coupled else None, source=None)


def _cut_routing(trace: RoutingTrace | None, length: int) -> RoutingTrace | None:
    """Row p of a trace belongs to input p: a row of `length` tokens has one fewer."""
    inputs = max(length - 1, 0)
    return None if trace is None else RoutingTrace(experts=trace.experts[:inputs], covered=trace.covered[:inputs])
