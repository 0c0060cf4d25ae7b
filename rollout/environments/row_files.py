"""Rows out of a `.jsonl` or `.parquet` file, each with its place in it. It knows no column: what a row means is its
reader's to say."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from rollout.errors import UserError, boundary

PlacedRow = tuple[str, Mapping[str, object]]
"""(file and line, column -> value)."""
_JSON_SUFFIXES = (".jsonl", ".ndjson")
_BATCH_ROWS = 64
"""Rows of a Parquet file that exist as Python objects at once."""


def read_rows(path: Path, setting: str) -> Iterator[PlacedRow]:
    """All rows of a file in its order, one after the other.

    Args:
        setting: where the user named the file, for messages, such as `environment.path`.

    Raises:
        UserError: the file is missing or of another kind (at once), or malformed (when its reading comes there).
    """
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(
            f"got {setting} = {path}, which {what} (looked up from {Path.cwd()}); give a .jsonl or .parquet file"
        )
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix in _JSON_SUFFIXES:
        return _read_jsonl(path)
    raise UserError(f"got {setting} = {path}; expected a file that ends in .jsonl (one JSON object a line) or .parquet")


def _read_jsonl(path: Path) -> Iterator[PlacedRow]:
    """Blank lines separate nothing and are no rows."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}, line {number}", _parse_line(line, f"{path}, line {number}")


def _parse_line(line: bytes, place: str) -> Mapping[str, object]:
    try:
        row: object = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as cause:
        raise UserError(f"{place}: not UTF-8 ({cause}); save the file as UTF-8") from cause
    except json.JSONDecodeError as cause:
        raise UserError(
            f"{place}: malformed JSON: {cause.msg} at column {cause.colno}; expected one JSON object a line"
        ) from cause
    if not isinstance(row, dict):
        raise UserError(f"{place}: a JSON {type(row).__name__}; expected one JSON object a line")
    return cast(dict[str, object], row)


def _read_parquet(path: Path) -> Iterator[PlacedRow]:
    from pyarrow import parquet

    number = 0
    with boundary(UserError, f"cannot read {path} as Parquet"), cast(Any, parquet).ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for row in cast(list[dict[str, object]], batch.to_pylist()):
                yield f"{path}, row {number} (from 0)", row
                number += 1
