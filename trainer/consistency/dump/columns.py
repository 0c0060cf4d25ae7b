"""How a dump of log-probs from any framework is laid out, and under which names its columns go. Torch-free.

It owns layouts, column names, and what is said about all rows at once; it must never know a file, a row or a model.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from rollout.config import Section
from rollout.errors import UserError
from trainer.consistency.dump.values import TEMPERATURE, TOP_K, TOP_P, CellType

ColumnKey = Literal[
    "id",
    "ids",
    "prompt_ids",
    "completion_ids",
    "mask",
    "logprobs",
    "version",
    "routing",
    "temperature",
    "top_p",
    "top_k",
]
SamplingKey = Literal["temperature", "top_p", "top_k"]
SAMPLING: Mapping[SamplingKey, CellType[float]] = MappingProxyType(
    {"temperature": TEMPERATURE, "top_p": TOP_P, "top_k": TOP_K}
)
NOT_TRUNCATED: Mapping[SamplingKey, float] = MappingProxyType({"temperature": 1.0, "top_p": 1.0, "top_k": 0})
"""What is assumed, and reported as assumed, where neither a row nor the command line says."""
EvidenceKey = Literal["logprobs", "version", "routing"]
EVIDENCE: tuple[EvidenceKey, ...] = ("logprobs", "version", "routing")
"""What checks need and a dump may lack: then they are incomplete, and nothing takes its place."""


class DumpLayout(StrEnum):
    """Which tokens the entries of a row's columns belong to."""

    TOKENS = "tokens"
    """One column of ids. Mask, log-probs and versions have one entry a token: entry t belongs to token t."""
    COMPLETION = "completion"
    """Prompt ids and completion ids. Everything else has one entry a completion token; without a mask all of these were
    sampled."""
    NEXT_TOKEN = "next_token"
    """One column of ids. Entry p of mask, log-probs and versions belongs to token p + 1, which position p predicts: T -
    1 entries, or T whose last one is outside the mask."""


class DumpColumns(Section):
    """Column names. Which of them a layout reads, and which of these it must find: `columns_read`."""

    id: str = "id"
    """Name of a row, text or number; without it a row is named by its number."""
    ids: str = "token_ids"
    """[T] integers: all tokens in order."""
    prompt_ids: str = "prompt_ids"
    """[P] integers."""
    completion_ids: str = "completion_ids"
    """[n] integers."""
    mask: str = "mask"
    """Booleans or 0/1: True where the policy chose the token."""
    logprobs: str = "logprobs"
    """Numbers, nats. What stands outside the mask is ignored, null included."""
    version: str = "version"
    """The policy that sampled: an integer or `eE-vN`, one for the row or one a token (null or -1 where nothing was
    sampled)."""
    routing: str = "routing"
    """[T - 1 or T, blocks, top_k] integers: experts of input p, which predicts token p + 1; null or -1 rows are
    missing."""
    temperature: str = "temperature"
    """One number for the row, as of its sampling."""
    top_p: str = "top_p"
    """One number for the row; 1 is off."""
    top_k: str = "top_k"
    """One integer for the row; 0 and -1 are off."""

    def name(self, key: ColumnKey) -> str:
        """The column that `key` is read from."""
        name: str = getattr(self, key)
        return name


_COMPLETION_COLUMNS = DumpColumns(mask="completion_mask", logprobs="completion_logprobs")
"""Names that layout `completion` has where the command line gives no others."""


class DumpSettings(Section):
    """All that is said about a dump besides its rows."""

    layout: DumpLayout
    columns: DumpColumns
    named: frozenset[str] = frozenset()
    """Keys whose column the user named: such a column may not be absent."""
    sampling: dict[SamplingKey, float] = Field(default_factory=dict[SamplingKey, float])
    """Sampling parameters of all rows; they outrank the rows' own columns."""
    engine_dtype: str = "float32"
    """What the engine computed in, by its own word."""


def columns_read(layout: DumpLayout) -> tuple[ColumnKey, ...]:
    """The keys that a layout reads, those it needs first."""
    prompt_apart: tuple[ColumnKey, ...] = ("prompt_ids", "completion_ids", "logprobs", "id", "mask")
    ids: tuple[ColumnKey, ...] = prompt_apart if layout is DumpLayout.COMPLETION else ("ids", "mask", "logprobs", "id")
    return (*ids, "version", "routing", *SAMPLING)


def dump_settings(
    layout: str, names: Sequence[str], sampling: Mapping[SamplingKey, float | None], engine_dtype: str = "float32"
) -> DumpSettings:
    """Settings from what a command line holds.

    Args:
        layout: name of a `DumpLayout`.
        names: `KEY=COLUMN` each.
        sampling: None where nothing was said.
        engine_dtype: what the engine computed in.

    Raises:
        UserError: a layout, a key or a value that cannot be; the message names what can.
    """
    if layout not in list(DumpLayout):
        raise UserError(f"got --layout {layout}; expected one of {', '.join(DumpLayout)}")
    chosen = DumpLayout(layout)
    given = dict(_named_column(entry, chosen) for entry in names)
    said: dict[SamplingKey, float] = {}
    for key, value in sampling.items():
        if value is not None:
            try:
                said[key] = SAMPLING[key].read(value)
            except ValueError as error:
                raise UserError(f"--{key.replace('_', '-')}: {error}") from error
    preset = _COMPLETION_COLUMNS if chosen is DumpLayout.COMPLETION else DumpColumns()
    columns = preset.model_copy(update=given)
    return DumpSettings(
        layout=chosen, columns=columns, named=frozenset(given), sampling=said, engine_dtype=engine_dtype
    )


def _named_column(entry: str, layout: DumpLayout) -> tuple[str, str]:
    key, equals, column = entry.partition("=")
    known = columns_read(layout)
    if not equals or not column:
        raise UserError(f"got --columns {entry}; expected KEY=COLUMN, such as logprobs=rollout_logprobs")
    if key not in known:
        raise UserError(f"got --columns {entry}; layout {layout} reads the keys {', '.join(known)}")
    return key, column
