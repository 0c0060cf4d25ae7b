"""Prompts from a `.jsonl` or `.parquet` file: reading, and the identity of its tasks. It knows no tokenizer: templates are applied by the environment."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol, cast

from rollout.config import JsonlConfig
from rollout.environments.order import PassOrder
from rollout.environments.rows import TaskRow, parse_row
from rollout.errors import UserError, boundary
from rollout.prompts import Prompt, PromptCursor


class _Table(Protocol):
    def to_pylist(self) -> list[dict[str, object]]:
        """Rows as dictionaries."""
        ...


_JSON_SUFFIXES = (".jsonl", ".ndjson")


class JsonlSource:
    """All tasks of one file, in a seeded order (or the file's)."""

    def __init__(self, config: JsonlConfig, seed: int, require_answer: bool = False) -> None:
        """Read and check the whole file.

        Args:
            require_answer: the reward compares with the answer, so that a row without one is an error.

        Raises:
            UserError: the file is missing, malformed or empty; a row is not a task; two rows have one id.
        """
        self._rows: list[TaskRow] = []
        places: dict[str, str] = {}
        for number, (place, row) in enumerate(_read(config.path)):
            task = parse_row(row, number, place, config, require_answer)
            if task.prompt_id in places:
                taken = f"{place}: id {task.prompt_id!r} was already used at {places[task.prompt_id]}"
                raise UserError(f"{taken}; ids must be unique: correct them, or set environment.id_key to another column")
            places[task.prompt_id] = place
            self._rows.append(task)
        if not self._rows:
            raise UserError(f"{config.path} holds no prompts; give a file with at least one row")
        self._order = PassOrder(len(self._rows), seed, config.shuffle)

    @property
    def size(self) -> int:
        """Prompts in one pass."""
        return self._order.size

    def draw(self, cursor: PromptCursor, count: int) -> tuple[list[Prompt], PromptCursor]:
        """The next `count` prompts from `cursor`, and the cursor behind them."""
        return self._order.draw(cursor, count, self._prompt)

    def _prompt(self, row: int, pass_index: int) -> Prompt:
        return self._rows[row].prompt(pass_index)


def _read(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(file and line, row) of every row."""
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(f"got environment.path = {path}, which {what} (looked up from {Path.cwd()}); give a .jsonl or .parquet file")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix in _JSON_SUFFIXES:
        return _read_jsonl(path)
    raise UserError(f"got environment.path = {path}; expected a file that ends in .jsonl (one JSON object a line) or .parquet")


def _read_jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
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
        raise UserError(f"{place}: malformed JSON: {cause.msg} at column {cause.colno}; expected one JSON object a line") from cause
    if not isinstance(row, dict):
        raise UserError(f"{place}: a JSON {type(row).__name__}; expected one JSON object a line")
    return cast(dict[str, object], row)


def _read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, object]]]:
    from pyarrow import parquet

    with boundary(UserError, f"cannot read {path} as Parquet"):
        table = cast("_Table", parquet.read_table(path))  # pyright: ignore[reportUnknownMemberType] - pyarrow has no types
        rows = table.to_pylist()
    for number, row in enumerate(rows):
        yield f"{path}, row {number} (from 0)", row
