"""Chosen token terms as micro-batches: only the rows in question, up to the last token in question. Layer 3 of
diagnosis; numpy only, it runs nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import RoutingTrace
from trainer.batching.packing import micro_batch_of
from trainer.gradloc.probe.step_terms import StepTerms, Terms
from trainer.types.step import MicroBatch

FILLER = micro_batch_of(())
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
    """What `rank` runs for these terms, `num_passes` in number; `own` are its micro-batches of the step."""
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
    each = [(own[row.micro_batch], row) for row in rows]

    def cut(arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
        """[rows, widest] of each row's columns in question."""
        parts = [array[row.row, : row.width] for array, row in zip(arrays, rows, strict=True)]
        whole = np.zeros((len(rows), rows[0].width), dtype=parts[0].dtype)
        for index, part in enumerate(parts):
            whole[index, : part.size] = part
        return whole

    wanted = cut(chosen[row.micro_batch] for row in rows)
    lengths = tuple(min(micro.lengths[row.row], row.width) for micro, row in each)
    batch = MicroBatch(
        token_ids=cut(micro.token_ids for micro, _ in each),
        loss_mask=cut(micro.loss_mask for micro, _ in each) if config.coupled else wanted,
        old_logprobs=cut(micro.old_logprobs for micro, _ in each),
        rollout_logprobs=cut(micro.rollout_logprobs for micro, _ in each),
        advantages=cut(micro.advantages for micro, _ in each),
        token_weights=np.array([micro.token_weights[row.row] for micro, row in each], dtype=np.float32),
        trajectory_ids=tuple(micro.trajectory_ids[row.row] for micro, row in each),
        lengths=lengths,
        routing=tuple(
            _cut_routing(micro.routing[row.row], length) for (micro, row), length in zip(each, lengths, strict=True)
        ),
        truncations=tuple(micro.truncations[row.row] if micro.truncations else None for micro, row in each),
    )
    return Pass(rows=batch, chosen=wanted if config.coupled else None, source=None)


def _cut_routing(trace: RoutingTrace | None, length: int) -> RoutingTrace | None:
    """Row p of a trace belongs to input p: a row of `length` tokens has one fewer."""
    inputs = max(length - 1, 0)
    return None if trace is None else RoutingTrace(experts=trace.experts[:inputs], covered=trace.covered[:inputs])
