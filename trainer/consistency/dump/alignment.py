"""The columns of a row laid along its tokens, by the layout of the dump. Lengths that do not fit are findings; nothing
is cut or filled up. Numpy only.

It knows layouts and lengths; it must never know a model, a policy or what a log-prob should be.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import RoutingTrace
from trainer.consistency.checks.structure import Columns
from trainer.consistency.dump.cells import Cells
from trainer.consistency.dump.columns import ColumnKey, DumpLayout
from trainer.consistency.dump.values import EXPERTS, IDS, LOGPROBS, MASK, VERSIONS, VersionEntry, trace_of

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlignedRow(Columns):
    """One row, token by token; log-probs are 0 where the dump has no entry."""

    num_prompt: int
    """Tokens that stand in the prompt's column; 0 where there is none."""
    versions: tuple[VersionEntry, ...] = ()
    """Version of each span, by the dump's own word."""
    routing: RoutingTrace | None = None
    """None: not logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """The tokens that the entries of the other columns speak of: from `first` on, to the end."""

    total: int
    first: int
    spare: bool
    """One entry more is allowed at the end, which speaks of no token."""

    @property
    def entries(self) -> int:
        return self.total - self.first


def align(cells: Cells, layout: DumpLayout) -> AlignedRow | None:
    """Read a row's sequence columns; None where one is unfit or missing that the layout needs (the cells hold the
    findings)."""
    prompt_key: ColumnKey | None = "prompt_ids" if layout is DumpLayout.COMPLETION else None
    ids_key: ColumnKey = "completion_ids" if layout is DumpLayout.COMPLETION else "ids"
    prompt = [] if prompt_key is None else cells.read(prompt_key, IDS, required=True)
    given = cells.read(ids_key, IDS, required=True)
    mask = cells.read("mask", MASK, required=layout is not DumpLayout.COMPLETION)
    logprobs = cells.read("logprobs", LOGPROBS)
    versions = cells.read("version", VERSIONS)
    experts = cells.read("routing", EXPERTS)
    if not cells.has("logprobs"):
        cells.absent("logprobs", "; the row is not scored")
    if not cells.has("version"):
        cells.absent("version", "; without it every token counts as sampled by the given model")
    if prompt == given == []:
        cells.fail(ids_key, "no_tokens", "got an empty list; expected at least one token")
    if cells.failed or prompt is None or given is None:
        return None
    first = {DumpLayout.TOKENS: 0, DumpLayout.COMPLETION: len(prompt), DumpLayout.NEXT_TOKEN: 1}[layout]
    frame = _Frame(total=len(prompt) + len(given), first=first, spare=layout is DumpLayout.NEXT_TOKEN)
    mask = [1] * frame.entries if mask is None else mask
    _refuse_sampled_spare(cells, mask, frame)
    row = AlignedRow(
        token_ids=np.array(prompt + given, dtype=np.int64),
        num_prompt=len(prompt),
        sampled=_placed(cells, "mask", np.array(mask, dtype=np.bool_), frame),
        logprobs=None if logprobs is None else _placed(cells, "logprobs", _nats(logprobs), frame),
        spans=None,
        routing=None if experts is None else _trace(cells, experts, frame),
    )
    if cells.has("version") and not cells.failed:
        spans, names = _runs(cells, versions, row.sampled, frame)
        row = replace(row, spans=spans, versions=names)
    return None if cells.failed else row


def _nats(logprobs: Sequence[float | None]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return np.array([np.nan if entry is None else entry for entry in logprobs], dtype=np.float64).astype(np.float32)


def _fits(cells: Cells, key: ColumnKey, entries: int, frame: _Frame) -> bool:
    if entries == frame.entries or (frame.spare and entries == frame.entries + 1):
        return True
    also = f" (or {frame.entries + 1}, the last one about no token)" if frame.spare else ""
    spoken = f"the {frame.total} tokens" + (f" from token {frame.first} on" if frame.first else "")
    cells.fail(
        key, "lengths_differ", f"got {entries} entries; expected {frame.entries}{also}, one for each of {spoken}"
    )
    return False


def _placed(cells: Cells, key: ColumnKey, values: NDArray[_Scalar], frame: _Frame) -> NDArray[_Scalar]:
    """[T] with 0 at tokens that no entry speaks of, and at all of them where the length does not fit."""
    placed = np.zeros(frame.total, dtype=values.dtype)
    if _fits(cells, key, values.size, frame):
        placed[frame.first :] = values[: frame.entries]
    return placed


def _refuse_sampled_spare(cells: Cells, mask: Sequence[int], frame: _Frame) -> None:
    if frame.spare and len(mask) == frame.total and mask[-1]:
        detail = (
            f"got {len(mask)} entries for {frame.total} tokens, the last one inside the mask, and nothing comes after "
            "it; expected 0 there: the mask is aligned with the tokens themselves, as in --layout tokens"
        )
        cells.fail("mask", "last_entry_sampled", detail, (frame.total - 1,))


def _runs(
    cells: Cells, versions: list[VersionEntry] | VersionEntry, sampled: NDArray[np.bool_], frame: _Frame
) -> tuple[tuple[tuple[int, int], ...], tuple[VersionEntry, ...]]:
    """[start, end) of the tokens that were sampled under one version each, and these versions."""
    if not isinstance(versions, list):
        versions = [versions if token else None for token in sampled[frame.first :]]
    if not _fits(cells, "version", len(versions), frame):
        return (), ()
    runs: dict[tuple[int, int], VersionEntry] = {}
    position = frame.first
    for version, entries in groupby(versions[: frame.entries]):
        end = position + len(list(entries))
        if version is not None and not (isinstance(version, int) and version < 0):
            runs[position, end] = version
        position = end
    return tuple(runs), tuple(runs.values())


def _trace(cells: Cells, rows: list[list[list[int]] | None], frame: _Frame) -> RoutingTrace | None:
    """The rows that predict something; a row of the last token, where there is one, predicts nothing."""
    try:
        trace = trace_of(rows)
    except ValueError as error:
        cells.fail("routing", "unfit_value", str(error))
        return None
    inputs = frame.total - 1
    if trace is not None and len(rows) not in (inputs, inputs + 1):
        detail = (
            f"got {len(rows)} rows; expected {inputs} or {inputs + 1}, one for each of the {frame.total} tokens as "
            "input"
        )
        cells.fail("routing", "lengths_differ", detail)
        return None
    return None if trace is None else RoutingTrace(experts=trace.experts[:inputs], covered=trace.covered[:inputs])
