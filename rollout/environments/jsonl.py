"""Prompts from a `.jsonl` or `.parquet` file: reading, and the identity of its tasks. It knows no tokenizer: templates
are applied by the environment."""

from rollout.config import JsonlConfig
from rollout.environments.order import PassOrder
from rollout.environments.row_files import read_rows
from rollout.environments.rows import TaskRow, parse_row
from rollout.errors import UserError
from rollout.types.prompts import Prompt, PromptCursor


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
        for number, (place, row) in enumerate(read_rows(config.path, "environment.path")):
            task = parse_row(row, number, place, config, require_answer)
            if task.prompt_id in places:
                taken = f"{place}: id {task.prompt_id!r} was already used at {places[task.prompt_id]}"
                raise UserError(
                    f"{taken}; ids must be unique: correct them, or set environment.id_key to another column"
                )
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
