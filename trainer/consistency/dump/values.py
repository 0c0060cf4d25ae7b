"""From a cell of a dump to an array. It knows what a cell may hold, never which row or column it stands in. Torch-free.

Every reader raises a ValueError that says what was got and what was expected; nothing is converted that could have been
meant otherwise.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BeforeValidator, Field, StrictFloat, StrictInt, StrictStr, TypeAdapter
from pydantic import ValidationError as UnfitError

from rollout.types.trajectory import RoutingTrace

_Value = TypeVar("_Value")
VersionEntry: TypeAlias = int | str | None
"""A version as it stands in a dump; None, or a number below 0, where nothing was sampled."""
_WIDEST = np.iinfo(np.int64)


@dataclass(frozen=True, slots=True)
class CellType(Generic[_Value]):
    """What a cell may hold."""

    adapter: TypeAdapter[_Value]
    expected: str
    """In words, with the cure."""

    def read(self, cell: object) -> _Value:
        """The cell's value.

        Raises:
            ValueError: it holds something else; the message shows the first entry that does not fit.
        """
        try:
            return self.adapter.validate_python(cell)
        except UnfitError as error:
            first = error.errors(include_url=False)[0]
            entries = "entries such as " if any(isinstance(part, int) for part in first["loc"]) else ""
            raise ValueError(f"got {entries}{_shown(first['input'])}; expected {self.expected}") from error


def _shown(value: object) -> str:
    """Type and beginning of a value, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _whole(entry: object) -> object:
    """A column of integers with gaps becomes one of floats in many tools."""
    return int(entry) if isinstance(entry, float) and entry.is_integer() else entry


_Version = Annotated[StrictInt | StrictStr | None, BeforeValidator(_whole)]
_ONE_A_TOKEN = "with one entry a token: a row is one sequence"
NAME = CellType(TypeAdapter[str | int | float](StrictStr | StrictInt | StrictFloat), "text or a number")
IDS = CellType(
    TypeAdapter(list[Annotated[int, Field(strict=True, ge=_WIDEST.min, le=_WIDEST.max)]]),
    f"a list of integers {_ONE_A_TOKEN}",
)
MASK = CellType(
    TypeAdapter(list[Literal[0, 1]]), f"a list of booleans, or of 0 and 1, {_ONE_A_TOKEN}; a mask, not weights"
)
LOGPROBS = CellType(TypeAdapter(list[StrictFloat | None]), f"a list of numbers {_ONE_A_TOKEN}")
"""Null is for the checks to find wherever a token was sampled."""
VERSIONS = CellType(
    TypeAdapter[list[VersionEntry] | VersionEntry](list[_Version] | _Version),
    "an integer, a name such as e1-v3, or null where nothing was sampled: one for the row, or a list with one a token",
)
EXPERTS = CellType(
    TypeAdapter(list[list[list[Annotated[int, Field(strict=True, le=65535)]]] | None]),
    "integers [rows, blocks, top_k] up to 65535, one row a token; null, or -1, where experts are missing",
)
TEMPERATURE = CellType(
    TypeAdapter[float](Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]),
    "a temperature above 0: tokens chosen greedily have no distribution of their own, so give --temperature 1 to "
    "compare raw log-probs",
)
TOP_P = CellType(
    TypeAdapter[float](Annotated[float, Field(strict=True, gt=0, le=1)]), "more than 0 and at most 1 (1 is off)"
)
TOP_K = CellType(
    TypeAdapter[float](
        Annotated[float, Field(strict=True, ge=-1, multiple_of=1), AfterValidator(lambda value: max(value, 0.0))]
    ),
    "a whole number, 0 or -1 for off",
)


def trace_of(rows: list[list[list[int]] | None]) -> RoutingTrace | None:
    """The experts of each row; None where there is no row at all. A row that is null, or that holds a negative expert,
    is missing.

    Raises:
        ValueError: the rows are not alike.
    """
    present = [row for row in rows if row is not None]
    if not present:
        return None
    try:
        found: NDArray[Any] = np.asarray(present, dtype=np.int64)
    except ValueError as error:
        raise ValueError(f"got rows of unequal shape; expected {EXPERTS.expected}") from error
    if found.ndim != 3 or found.size == 0:
        raise ValueError(f"got the shape {found.shape} in the rows that are there; expected {EXPERTS.expected}")
    covered = np.array([row is not None for row in rows], dtype=np.bool_)
    experts = np.zeros((len(rows), *found.shape[1:]), dtype=np.uint16)
    whole = cast(NDArray[np.int64], found.min(axis=(1, 2))) >= 0
    experts[covered] = np.where(whole[:, None, None], found, 0)
    covered[covered] = whole
    return RoutingTrace(experts=experts, covered=covered)
