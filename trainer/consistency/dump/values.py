"""From a cell of a dump to an array. It knows what a cell may hold, never which row or column it stands in. Numpy only.

Every function raises a ValueError that says what was got and what was expected; nothing is converted that could have
been meant otherwise.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

VersionEntry: TypeAlias = int | str | None
"""A version as it stands in a dump; None, or a number below 0, where nothing was sampled."""
_MAX_EXPERT = 65535


def read_ids(cell: object) -> NDArray[np.int64]:
    """[n] token ids."""
    array = _flat(cell)
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"got entries such as {_odd(cast(list[object], cell), int)}; expected a list of integers")
    return array.astype(np.int64)


def read_mask(cell: object) -> NDArray[np.bool_]:
    """[n] from booleans, or from 0 and 1 as integers or floats."""
    array = _flat(cell)
    if array.dtype.kind == "b" or array.size == 0:
        return array.astype(np.bool_)
    if array.dtype.kind not in "iuf":
        raise ValueError(
            f"got entries such as {_odd(cast(list[object], cell), bool, int, float)}; expected a list of booleans, or "
            "of 0 and 1"
        )
    other = array[(array != 0) & (array != 1)]
    if other.size:
        raise ValueError(
            f"got {other.size} entries other than 0 and 1 (first: {other[0]}); expected a mask, not weights"
        )
    return array.astype(np.bool_)


def read_logprobs(cell: object) -> NDArray[np.float32]:
    """[n] nats; null is NaN, which the checks find wherever a token was sampled."""
    array = _flat(cell)
    entries = cast(list[object], cell)
    if array.dtype.kind == "O" and all(entry is None or _is_number(entry) for entry in entries):
        array = np.array([np.nan if entry is None else entry for entry in entries], dtype=np.float64)
    if array.size and array.dtype.kind not in "iuf":
        raise ValueError(f"got entries such as {_odd(entries, int, float)}; expected a list of numbers")
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def read_versions(cell: object) -> VersionEntry | list[VersionEntry]:
    """One version for the row, or one an entry."""
    if isinstance(cell, list):
        return [_version(entry) for entry in cast(list[object], cell)]
    return _version(cell)


def read_experts(cell: object) -> tuple[NDArray[np.uint16], NDArray[np.bool_]] | None:
    """Experts [rows, blocks, top_k] and which rows there are [rows]; None where there is no row at all.

    A row that is null, or that holds a negative expert, is missing.
    """
    if not isinstance(cell, list):
        raise ValueError(f"got {shown(cell)}; expected a list with one entry a token")
    rows = cast(list[object], cell)
    present = [row for row in rows if row is not None]
    if not present:
        return None
    found = _array(present)
    if found.ndim != 3 or found.dtype.kind not in "iu" or found.size == 0:
        raise ValueError(
            f"got {found.dtype} of shape {found.shape} in the rows that are there; expected integers [rows, blocks, "
            "top_k]"
        )
    if int(found.max()) > _MAX_EXPERT:
        raise ValueError(f"got expert {int(found.max())}; expected at most {_MAX_EXPERT}")
    covered = np.array([row is not None for row in rows], dtype=np.bool_)
    experts = np.zeros((len(rows), *found.shape[1:]), dtype=np.uint16)
    whole = cast(NDArray[np.int64], found.min(axis=(1, 2))) >= 0
    experts[covered] = np.where(whole[:, None, None], found, 0)
    covered[covered] = whole
    return experts, covered


def shown(value: object) -> str:
    """Type and beginning of a value, for messages."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _version(entry: object) -> VersionEntry:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, float) and entry.is_integer():
        entry = int(entry)  # a column of integers with gaps becomes one of floats in many tools
    if isinstance(entry, bool) or not isinstance(entry, int):
        raise ValueError(
            f"got {shown(entry)}; expected an integer, a name such as e1-v3, or null where nothing was sampled"
        )
    return entry


def _flat(cell: object) -> NDArray[Any]:
    """[n] of whatever the entries are."""
    if not isinstance(cell, list):
        raise ValueError(f"got {shown(cell)}; expected a list with one entry a token")
    array = _array(cast(list[object], cell))
    if array.ndim != 1:
        raise ValueError(
            f"got lists within a list, of shape {array.shape}; expected one list with one entry a token: a row is one "
            "sequence"
        )
    return array


def _array(cell: Sequence[object]) -> NDArray[Any]:
    try:
        return np.asarray(cell)
    except ValueError as error:
        raise ValueError("got lists of unequal length within a list; expected entries that are alike") from error


def _odd(cell: Sequence[object], *kinds: type) -> str:
    """The first entry that is of none of these kinds."""
    return next((shown(entry) for entry in cell if type(entry) not in kinds), "of several kinds")


def _is_number(entry: object) -> bool:
    return isinstance(entry, int | float) and not isinstance(entry, bool)
