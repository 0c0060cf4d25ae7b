"""The columns of a row laid along its tokens, by the layout of the dump. Lengths that do not fit are findings; nothing
is cut or filled up. Numpy only.

It knows layouts and lengths; it must never know a model, a policy or what a log-prob should be.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainer.consistency.dump.cells import Cells
from trainer.consistency.dump.columns import ColumnKey, DumpLayout
from trainer.consistency.dump.values import (
    VersionEntry,
    read_experts,
    read_ids,
    read_logprobs,
    read_mask,
    read_versions,
)

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRun:
    """Tokens [start, end) that were sampled under one version, by the dump's own word."""

    start: int
    end: int
    version: VersionEntry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AlignedRow:
    """One row, token by token."""

    token_ids: NDArray[np.int64]
    """[T]"""
    num_prompt: int
    """Tokens that stand in the prompt's column; 0 where there is none."""
    sampled: NDArray[np.bool_]
    """[T]"""
    logprobs: NDArray[np.float32] | None
    """[T] nats, 0 where the dump has no entry. None: not logged."""
    versions: tuple[VersionRun, ...] | None
    """In order. None: not logged."""
    experts: NDArray[np.uint16] | None
    """[T - 1, blocks, top_k]; None: not logged."""
    covered: NDArray[np.bool_] | None
    """[T - 1] rows of `experts` that are there."""


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
    ids, num_prompt = _ids(cells, layout)
    mask = cells.require("mask", read_mask) if layout is not DumpLayout.COMPLETION else cells.read("mask", read_mask)
    logprobs = cells.read("logprobs", read_logprobs)
    versions = cells.read("version", read_versions)
    routing = cells.read("routing", read_experts)
    if not cells.has("logprobs"):
        cells.absent("logprobs", "; the row is not scored")
    if not cells.has("version"):
        cells.absent("version", "; without it every token counts as sampled by the given model")
    if ids is not None and ids.size == 0:
        cells.fail(
            "completion_ids" if layout is DumpLayout.COMPLETION else "ids",
            "no_tokens",
            "got an empty list; expected at least one token",
        )
    if cells.failed or ids is None:
        return None
    first = {DumpLayout.TOKENS: 0, DumpLayout.COMPLETION: num_prompt, DumpLayout.NEXT_TOKEN: 1}[layout]
    frame = _Frame(total=ids.size, first=first, spare=layout is DumpLayout.NEXT_TOKEN)
    if mask is None:
        mask = np.ones(frame.entries, dtype=np.bool_)
    _refuse_sampled_spare(cells, mask, frame)
    sampled = _placed(cells, "mask", mask, frame, fill=False)
    laid = None if logprobs is None else _placed(cells, "logprobs", logprobs, frame, fill=0.0)
    runs = None if sampled is None or versions is None else _runs(cells, versions, sampled, frame)
    trace = None if routing is None else _trace(cells, *routing, frame)
    if cells.failed or sampled is None:
        return None
    experts, covered = trace or (None, None)
    return AlignedRow(
        token_ids=ids,
        num_prompt=num_prompt,
        sampled=sampled,
        logprobs=laid,
        versions=runs,
        experts=experts,
        covered=covered,
    )


def mask_runs(sampled: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """[start, end) of each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], sampled, [False])).astype(np.int8)))
    for start, end in edges.reshape(-1, 2):
        yield int(start), int(end)


def _ids(cells: Cells, layout: DumpLayout) -> tuple[NDArray[np.int64] | None, int]:
    """All ids, and how many of them are the prompt's."""
    if layout is not DumpLayout.COMPLETION:
        return cells.require("ids", read_ids), 0
    prompt, completion = cells.require("prompt_ids", read_ids), cells.require("completion_ids", read_ids)
    return (None, 0) if prompt is None or completion is None else (np.concatenate([prompt, completion]), prompt.size)


def _fits(cells: Cells, key: ColumnKey, entries: int, frame: _Frame) -> bool:
    if entries == frame.entries or (frame.spare and entries == frame.entries + 1):
        return True
    also = f" (or {frame.entries + 1}, the last one about no token)" if frame.spare else ""
    spoken = (
        f"the {frame.total} tokens" if frame.first == 0 else f"the {frame.total} tokens from token {frame.first} on"
    )
    cells.fail(
        key, "lengths_differ", f"got {entries} entries; expected {frame.entries}{also}, one for each of {spoken}"
    )
    return False


def _placed(
    cells: Cells,
    key: ColumnKey,
    values: NDArray[_Scalar],
    frame: _Frame,
    fill: Any,  # noqa: ANN401
) -> NDArray[_Scalar] | None:
    """[T] with `fill` at tokens that no entry speaks of."""
    if not _fits(cells, key, values.size, frame):
        return None
    placed = np.full(frame.total, fill, dtype=values.dtype)
    placed[frame.first :] = values[: frame.entries]
    return placed


def _refuse_sampled_spare(cells: Cells, mask: NDArray[np.bool_], frame: _Frame) -> None:
    if frame.spare and mask.size == frame.total and mask[-1]:
        detail = (
            f"got {mask.size} entries for {frame.total} tokens, the last one inside the mask, and nothing comes after "
            "it; expected 0 there"
        )
        cells.fail(
            "mask",
            "last_entry_sampled",
            f"{detail}: the mask is aligned with the tokens themselves, as in --layout tokens",
            (frame.total - 1,),
        )


def _runs(
    cells: Cells, versions: VersionEntry | list[VersionEntry], sampled: NDArray[np.bool_], frame: _Frame
) -> tuple[VersionRun, ...]:
    if not isinstance(versions, list):
        return tuple(
            VersionRun(start=start, end=end, version=versions)
            for start, end in mask_runs(sampled)
            if _names_one(versions)
        )
    if not _fits(cells, "version", len(versions), frame):
        return ()
    runs: list[VersionRun] = []
    position = frame.first
    for version, entries in groupby(versions[: frame.entries]):
        end = position + len(list(entries))
        if _names_one(version):
            runs.append(VersionRun(start=position, end=end, version=version))
        position = end
    return tuple(runs)


def _names_one(version: VersionEntry) -> bool:
    return version is not None and not (isinstance(version, int) and version < 0)


def _trace(
    cells: Cells, experts: NDArray[np.uint16], covered: NDArray[np.bool_], frame: _Frame
) -> tuple[NDArray[np.uint16], NDArray[np.bool_]] | None:
    """The rows that predict something; a row of the last token, where there is one, predicts nothing."""
    rows = frame.total - 1
    if covered.size not in (rows, rows + 1):
        cells.fail(
            "routing",
            "lengths_differ",
            f"got {covered.size} rows; expected {rows} or {rows + 1}, one for each of the {frame.total} tokens as "
            "input",
        )
        return None
    return experts[:rows], covered[:rows]
