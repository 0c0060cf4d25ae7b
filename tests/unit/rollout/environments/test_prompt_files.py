"""Prompt files: rows become tasks, and a bad row is named by file and line with what was expected."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from rollout.config import JsonlConfig
from rollout.environments.registry import build_source
from rollout.errors import UserError
from rollout.types.prompts import Message, PromptCursor

GOOD = '{"prompt": "1="}'


def read(path: Path, require_answer: bool = False, **settings: str):
    """All prompts of a file, in its order."""
    config = JsonlConfig.model_validate({"path": path, "shuffle": False, **settings})
    source = build_source(config, seed=0, require_answer=require_answer)
    return source.draw(PromptCursor(), source.size)[0]


def write(tmp_path: Path, *lines: str | dict[str, Any]):
    """A JSONL file of these lines."""
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_row_keeps_its_id_its_answer_and_its_further_columns_as_strings(tmp_path: Path):
    row = {"id": 17, "prompt": "2+2=", "answer": 4, "level": "easy", "tags": ["a", "é"], "hard": False, "source": None}
    (prompt,) = read(write(tmp_path, row))
    assert (prompt.prompt_id, prompt.text, prompt.answer, prompt.messages) == ("17", "2+2=", "4", ())
    assert prompt.metadata == (("hard", "false"), ("level", "easy"), ("tags", '["a","é"]'))


def test_a_row_without_an_id_is_named_by_its_number_and_blank_lines_are_no_rows(tmp_path: Path):
    prompts = read(write(tmp_path, GOOD, "", '{"prompt": "2="}', ""))
    assert [(p.prompt_id, p.text, p.answer) for p in prompts] == [("0", "1=", None), ("1", "2=", None)]


def test_messages_become_a_chat_behind_the_system_prompt(tmp_path: Path):
    row = {"messages": [{"role": "user", "content": "2+2?", "name": None}], "answer": "4"}
    (prompt,) = read(write(tmp_path, row), system_prompt="Be brief.")
    assert prompt.text is None
    assert prompt.messages == (Message(role="system", content="Be brief."), Message(role="user", content="2+2?"))


def test_columns_may_have_other_names(tmp_path: Path):
    path = write(tmp_path, {"uid": "x", "question": "1+1=", "solution": 2.5, "id": "kept"})
    (prompt,) = read(path, prompt_key="question", answer_key="solution", id_key="uid")
    assert (prompt.prompt_id, prompt.text, prompt.answer, prompt.metadata) == ("x", "1+1=", "2.5", (("id", "kept"),))


def test_one_column_may_hold_strings_or_messages(tmp_path: Path):
    path = write(tmp_path, GOOD, {"prompt": [{"role": "user", "content": "2="}]})
    raw, chat = read(path, messages_key="prompt")
    assert raw.text == "1="
    assert chat.messages == (Message(role="user", content="2="),)


def test_parquet_and_jsonl_of_the_same_rows_give_the_same_prompts(tmp_path: Path):
    rows: list[dict[str, Any]] = [
        {"id": "a", "prompt": "1=", "messages": None, "answer": "1", "level": 3},
        {"id": "b", "prompt": None, "messages": [{"role": "user", "content": "2="}], "answer": None, "level": 4},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    assert read(tmp_path / "tasks.parquet") == read(write(tmp_path, *rows))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1="', r"malformed JSON: .* at column \d+; expected one JSON object a line"),
        ('["1="]', "a JSON list; expected one JSON object a line"),
        ("1", "a JSON int; expected one JSON object a line"),
        (
            '{"question": "1=", "b": 2}',
            "neither 'prompt' nor 'messages'; found the columns b, question. Set environment.prompt_key",
        ),
        ("{}", "found the columns none"),
        (
            '{"prompt": "1=", "messages": [{"role": "user", "content": "1"}]}',
            "both 'prompt' and 'messages'; give one of them",
        ),
        ('{"prompt": 5}', "'prompt' is int 5; expected a string"),
        (
            '{"prompt": [{"role": "user", "content": "1"}]}',
            "expected a string .*set environment.messages_key = 'prompt'",
        ),
        ('{"prompt": ""}', "'prompt' is empty"),
        ('{"messages": "1="}', "'messages' is str '1='; expected a list of messages"),
        ('{"messages": []}', "'messages' is empty; expected at least one message"),
        (
            '{"messages": [{"role": "user"}]}',
            r"message 0 of 'messages' is dict .*expected \{\"role\": \"user\", \"content\": \"...\"\}",
        ),
        (
            '{"messages": [{"role": "user", "content": "1", "tool_calls": []}]}',
            "message 0 .* with two strings and no further keys",
        ),
        ('{"messages": [{"role": "user", "content": "1"}, "x"]}', "message 1 of 'messages' is str 'x'"),
        ('{"prompt": "2=", "answer": [1]}', r"'answer' is list \[1\]; expected a string or a number"),
        ('{"prompt": "2=", "answer": true}', "'answer' is bool True; expected a string or a number"),
        ('{"prompt": "2=", "id": {}}', "'id' is dict {}; expected a string or a number"),
        ('{"prompt": "2=", "id": 0}', "id '0' was already used at .*tasks.jsonl, line 1; ids must be unique"),
    ],
)
def test_a_bad_line_is_named_with_file_and_line(tmp_path: Path, line: str, message: str):
    path = write(tmp_path, GOOD, line)
    with pytest.raises(UserError, match=f"^{path}, line 2: .*{message}"):
        read(path)


def test_bytes_that_are_no_text_are_named_with_file_and_line(tmp_path: Path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match=r"tasks.jsonl, line 2: not UTF-8 .*save the file as UTF-8"):
        read(path)


def test_a_missing_answer_is_an_error_only_where_the_reward_compares_with_it(tmp_path: Path):
    path = write(tmp_path, '{"prompt": "1=", "target": "1"}')
    assert read(path)[0].answer is None
    with pytest.raises(
        UserError,
        match=(
            r"line 1: no 'answer', which the reward compares with; found the columns prompt, target\."
            r" .*environment\.answer_key"
        ),
    ):
        read(path, require_answer=True)
    assert read(path, require_answer=True, answer_key="target")[0].answer == "1"


def test_a_system_prompt_is_refused_for_raw_prompts(tmp_path: Path):
    with pytest.raises(
        UserError, match=r"line 1: a raw prompt, but environment.system_prompt is set; give 'messages' instead"
    ):
        read(write(tmp_path, GOOD), system_prompt="Be brief.")


def test_an_empty_prompt_set_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"tasks.jsonl holds no prompts; give a file with at least one row"):
        read(write(tmp_path, "", "  "))
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(UserError, match=r"none.parquet holds no prompts"):
        read(tmp_path / "none.parquet")


def test_a_file_that_is_not_there_or_of_another_kind_is_refused(tmp_path: Path):
    with pytest.raises(
        UserError, match=r"none.jsonl, which does not exist \(looked up from .*\); give a .jsonl or .parquet file"
    ):
        read(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="which is a directory"):
        read(tmp_path)
    (tmp_path / "tasks.json").write_text("[]")
    with pytest.raises(UserError, match=r"expected a file that ends in .jsonl \(one JSON object a line\) or .parquet"):
        read(tmp_path / "tasks.json")
    (tmp_path / "tasks.parquet").write_text("no parquet")
    with pytest.raises(UserError, match=r"cannot read .*tasks.parquet as Parquet"):
        read(tmp_path / "tasks.parquet")


def test_a_bad_parquet_row_is_named_by_its_number(tmp_path: Path):
    parquet.write_table(pa.table({"prompt": ["1=", None]}), tmp_path / "tasks.parquet")
    with pytest.raises(
        UserError, match=r"tasks.parquet, row 1 \(from 0\): neither 'prompt' nor 'messages'; found the columns none"
    ):
        read(tmp_path / "tasks.parquet")
