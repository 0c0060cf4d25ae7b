"""Prompts from a `.jsonl` or `.parquet` file: reading, and the identity of its tasks. How a prompt becomes tokens is
decided in `single_turn`."""

from dataclasses import replace

from rollout.config import EvaluationConfig, JsonlConfig
from rollout.environments.order import PassOrder
from rollout.environments.row_files import read_rows
from rollout.environments.rows import parse_row
from rollout.environments.single_turn import SingleTurnEnv, prompt_tokens
from rollout.errors import UserError
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.prompts import Prompt
from rollout.types.protocols import Env, PromptSource


def source(config: JsonlConfig, seed: int, require_answer: bool, held_out: EvaluationConfig | None) -> PromptSource:
    """All tasks of one file, in a seeded order (or the file's); the whole file is read and checked.

    Args:
        require_answer: the reward compares with the answer, so that a row without one is an error.
        held_out: read its file instead, which has the same columns.

    Raises:
        UserError: the file is missing, malformed or empty; a row is not a task; two rows have one id.
    """
    path, setting = (held_out.path, "evaluation.path") if held_out else (config.path, "environment.path")
    if path is None:
        raise UserError(
            'got evaluation.every_steps with environment.type = "jsonl" and no evaluation.path; set it to a file of'
            " held-out prompts"
        )
    tasks: dict[str, Prompt] = {}
    places: dict[str, str] = {}
    for number, (place, row) in enumerate(read_rows(path, setting)):
        task = parse_row(row, number, place, config, require_answer)
        if task.prompt_id in places:
            taken = f"{place}: id {task.prompt_id!r} was already used at {places[task.prompt_id]}"
            raise UserError(f"{taken}; ids must be unique: correct them, or set environment.id_key to another column")
        tasks[task.prompt_id], places[task.prompt_id] = task, place
    if not tasks:
        raise UserError(f"{path} holds no prompts; give a file with at least one row")
    rows = tuple(tasks.values())
    return PassOrder(len(rows), seed, config.shuffle, lambda row, pass_index: replace(rows[row], pass_index=pass_index))


def envs(config: JsonlConfig, prompt: Prompt, tokenizer: Tokenizer, count: int) -> tuple[Env, ...]:
    """Environments of one turn."""
    ids = prompt_tokens(prompt, tokenizer, config.apply_chat_template)
    return tuple(SingleTurnEnv(config.type, ids) for _ in range(count))
