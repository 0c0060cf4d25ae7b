"""The layout of safetensors files: names, dtypes, shapes and where the bytes lie. It reads no tensor and knows no array
library."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

from rollout.errors import UserError

_MAX_HEADER_BYTES = 100_000_000
_SIZES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpan:
    """One tensor of a file: its bytes are [start, end) of the file, little-endian, row-major."""

    name: str
    dtype: str
    """safetensors name of the dtype."""
    shape: tuple[int, ...]
    start: int
    end: int


def tensor_spans(path: Path) -> tuple[TensorSpan, ...]:
    """Where each tensor of a safetensors file lies, in the order of the bytes.

    Raises:
        UserError: the file is missing, cut short, or not in the format.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise _broken(path, f"its header of {length} bytes does not fit the {size} bytes of the file")
            header: object = json.loads(file.read(length))
    except OSError as error:
        raise UserError(f"cannot read weights file {path}: {error.strerror}; expected a safetensors file") from error
    except ValueError as error:
        raise _broken(path, f"its header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise _broken(path, "its header is not an object")
    entries = {name: entry for name, entry in cast(dict[str, object], header).items() if name != "__metadata__"}
    return tuple(
        sorted(
            (_span(path, name, entry, 8 + length, size) for name, entry in entries.items()),
            key=lambda span: (span.start, span.end),
        )
    )


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model directory, by name; those that an index names but that are absent are errors.

    Raises:
        UserError: there is none, or one is missing.
    """
    files = tuple(sorted(directory.glob("*.safetensors")))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = cast(dict[str, dict[str, str]], json.loads(index.read_text()))["weight_map"]
            files = tuple(directory / name for name in sorted(set(weight_map.values())))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(
                f"{index} is broken ({error}); expected an object with `weight_map`; copy the model again"
            ) from error
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise UserError(
            f"model directory {directory} lacks weight files that its index names: {', '.join(absent)}; copy the model "
            "again"
        )
    if not files:
        raise UserError(
            f"model directory {directory} holds no *.safetensors file; save the model with `save_pretrained(..., "
            "safe_serialization=True)`"
        )
    return files


def _span(path: Path, name: str, entry: object, base: int, size: int) -> TensorSpan:
    try:
        fields = cast(dict[str, object], entry)
        dtype, shape = str(fields["dtype"]), tuple(int(n) for n in cast(list[int], fields["shape"]))
        start, end = (base + int(offset) for offset in cast(list[int], fields["data_offsets"]))
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"its entry of {name} lacks dtype, shape or offsets") from error
    if not base <= start <= end <= size:
        raise _broken(path, f"the bytes of {name} end at {end} but the file has {size}: it was cut short")
    if dtype in _SIZES and end - start != prod(shape) * _SIZES[dtype]:
        raise _broken(path, f"{name} has {end - start} bytes for {dtype} {shape}")
    return TensorSpan(name=name, dtype=dtype, shape=shape, start=start, end=end)


def _broken(path: Path, what: str) -> UserError:
    return UserError(f"weights file {path} is broken: {what}; copy or save the model again")
