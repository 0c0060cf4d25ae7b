"""Where prompts come from, in which order, and how they become tokens."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paths import WORKLOAD

from rollout.config import ArithmeticConfig, JsonlConfig
from rollout.environments.order import seeded_order
from rollout.environments.registry import build_envs, build_source
from rollout.errors import UserError
from rollout.tokenization.tokenizer import Tokenizer, load_tokenizer
from rollout.types.prompts import Message, Prompt, PromptCursor
from rollout.types.protocols import Env, PromptSource

SUMS = build_source(ArithmeticConfig(digits=1, prompts=7), seed=3)


def one_pass(source: PromptSource, pass_index: int = 0):
    """All prompts of one pass, in order."""
    return source.draw(PromptCursor(pass_index=pass_index), source.size)[0]


def test_arithmetic_asks_padded_sums_and_expects_their_digits_in_reverse():
    prompts = one_pass(build_source(ArithmeticConfig(digits=2, prompts=500), seed=0))
    for prompt in prompts:
        assert prompt.text is not None
        left, right = prompt.text.removesuffix("=").split("+")
        assert len(left) == len(right) == 2
        assert prompt.answer == str(int(left) + int(right))[::-1]
        assert prompt.prompt_id == f"{left}+{right}"


async def replies_of(env: Env) -> list[list[int]]:
    replies: list[list[int]] = []
    while (reply := await env.reply(np.array([3, 1], dtype=np.int32))) is not None:
        replies.append(reply.tolist())
    return replies


def test_arithmetic_of_several_turns_asks_other_sums_of_the_pass_and_expects_all_answers():
    config, tokenizer = ArithmeticConfig(digits=1, prompts=7, turns=3), load_tokenizer(WORKLOAD / "model")
    answers = {
        prompt.text: prompt.answer for prompt in one_pass(build_source(ArithmeticConfig(digits=1, prompts=7), seed=3))
    }
    for prompt in one_pass(build_source(config, seed=3)):
        later = [text for _, text in prompt.metadata]
        assert len({prompt.text, *later}) == 3
        assert prompt.answer == "".join(str(answers[text]) for text in (prompt.text, *later))
        for env in build_envs(config, prompt, tokenizer, 2):  # each its own conversation
            assert asyncio.run(replies_of(env)) == [tokenizer.encode(text).tolist() for text in later]


def test_more_turns_than_sums_are_refused():
    with pytest.raises(ValueError, match="got turns = 3 with prompts = 2"):
        ArithmeticConfig(prompts=2, turns=3)


def test_arithmetic_sums_are_distinct_even_when_all_there_are_are_asked_for():
    assert len({p.prompt_id for p in one_pass(build_source(ArithmeticConfig(digits=1, prompts=100), seed=1))}) == 100


def test_the_seed_and_nothing_else_chooses_the_sums_and_their_order():
    config = ArithmeticConfig(prompts=4)
    assert [p.text for p in one_pass(build_source(config, seed=0))] == ["37+45=", "42+36=", "10+42=", "23+80="]
    assert one_pass(build_source(config, seed=0)) == one_pass(build_source(config, seed=0))
    assert one_pass(build_source(config, seed=0)) != one_pass(build_source(config, seed=1))


def test_every_pass_holds_the_same_tasks_under_the_same_ids_in_another_order():
    source = build_source(ArithmeticConfig(prompts=50), seed=0)
    first, second = one_pass(source, 0), one_pass(source, 1)
    assert {p.prompt_id for p in first} == {p.prompt_id for p in second}
    assert [p.prompt_id for p in first] != [p.prompt_id for p in second]
    assert {p.pass_index for p in second} == {1}


def test_an_order_is_a_permutation_that_no_library_version_can_change():
    assert seeded_order(10, seed=7, pass_index=2).tolist() == [7, 6, 3, 8, 0, 5, 2, 1, 9, 4]
    assert np.array_equal(np.sort(seeded_order(1000, seed=-1, pass_index=0)), np.arange(1000))


@given(st.lists(st.integers(0, 20), max_size=8), st.integers(0, 3), st.integers(0, 7))
def test_prompts_drawn_in_any_portions_are_those_drawn_at_once(portions: list[int], pass_index: int, index: int):
    start = PromptCursor(pass_index=pass_index, index=index)
    drawn: list[Prompt] = []
    cursor = start
    for count in portions:
        prompts, cursor = SUMS.draw(cursor, count)
        drawn += prompts
    at_once, behind = SUMS.draw(start, sum(portions))
    assert drawn == at_once
    assert len(drawn) == sum(portions)
    assert SUMS.draw(cursor, 1) == SUMS.draw(behind, 1)


def test_passes_follow_each_other_without_end():
    prompts, cursor = SUMS.draw(PromptCursor(), 7 * 5 + 3)
    assert [p.pass_index for p in prompts] == [0] * 7 + [1] * 7 + [2] * 7 + [3] * 7 + [4] * 7 + [5] * 3
    assert cursor == PromptCursor(pass_index=5, index=3)


def test_a_cursor_of_other_prompts_is_refused():
    with pytest.raises(
        UserError, match=r"stands at prompt 8 of pass 0, but a pass has 7 prompts; resume with the prompts"
    ):
        SUMS.draw(PromptCursor(index=8), 1)


def test_more_sums_than_there_are_is_a_user_error():
    with pytest.raises(UserError, match="operands of 1 digits make 100 sums; lower prompts or raise digits"):
        build_source(ArithmeticConfig(digits=1, prompts=101), seed=0)
    with pytest.raises(UserError, match="at most 18"):
        build_source(ArithmeticConfig(digits=19), seed=0)


def test_a_file_of_prompts_is_walked_in_its_own_order_when_asked(tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}="}}\n' for i in range(20)))
    kept = one_pass(build_source(JsonlConfig(path=path, shuffle=False), seed=0), 4)
    shuffled = one_pass(build_source(JsonlConfig(path=path), seed=0), 4)
    assert [p.prompt_id for p in kept] == [str(i) for i in range(20)]
    assert [p.prompt_id for p in shuffled] != [p.prompt_id for p in kept]
    assert sorted(shuffled, key=lambda p: int(p.prompt_id)) == kept


def test_the_fixed_workload_is_read_line_by_line_with_its_tokens():
    config = JsonlConfig(path=WORKLOAD / "prompts.jsonl", shuffle=False)
    tokenizer = load_tokenizer(WORKLOAD / "model")
    rows = [json.loads(line) for line in (WORKLOAD / "prompts.jsonl").read_text().splitlines()[:32]]
    for row, prompt in zip(rows, build_source(config, seed=0).draw(PromptCursor(), 32)[0], strict=True):
        assert (prompt.prompt_id, prompt.answer) == (str(row["id"]), row["answer"])
        assert build_envs(config, prompt, tokenizer, 1)[0].prompt_ids().tolist() == row["prompt_token_ids"]


@pytest.fixture
def chat_model(tmp_path: Path):
    """The workload's tokenizer with a chat template that writes `*` before each message and `=` at the end."""
    copy = tmp_path / "model"
    shutil.copytree(
        WORKLOAD / "model", copy, ignore=shutil.ignore_patterns("*.safetensors"), copy_function=shutil.copyfile
    )
    copy.chmod(0o755)
    (copy / "chat_template.jinja").write_text("{% for m in messages %}*{{ m.content }}{% endfor %}=")
    return load_tokenizer(copy)


def ids_of(config: JsonlConfig | ArithmeticConfig, prompt: Prompt, tokenizer: Tokenizer):
    return build_envs(config, prompt, tokenizer, 1)[0].prompt_ids().tolist()


def test_a_chat_template_is_applied_where_there_is_one(chat_model: Tokenizer):
    plain = load_tokenizer(WORKLOAD / "model")
    config = JsonlConfig(path=Path("unused.jsonl"))
    raw = Prompt(prompt_id="a", pass_index=0, text="1+2")
    chat = Prompt(
        prompt_id="b", pass_index=0, messages=(Message(role="system", content="7"), Message(role="user", content="1+2"))
    )
    assert ids_of(config, raw, plain) == [3, 12, 4]
    assert ids_of(config, raw, chat_model) == [15, 3, 12, 4, 14]
    assert ids_of(config, chat, chat_model) == [15, 9, 15, 3, 12, 4, 14]
    assert ids_of(config.model_copy(update={"apply_chat_template": False}), raw, chat_model) == [3, 12, 4]
    assert ids_of(ArithmeticConfig(), raw, chat_model) == [3, 12, 4]
    with pytest.raises(UserError, match="no chat template"):
        ids_of(config, chat, plain)


def test_a_doubled_beginning_of_sequence_is_refused(
    chat_model: Tokenizer, tmp_path: Path, golden: dict[str, dict[str, object]]
):
    assert golden["V18_bos"]["double_bos"] == 1
    folder = tmp_path / "model"
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<pad>"}))
    pipeline = json.loads((folder / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<pad>", "type_id": 0}}
    pipeline["post_processor"]["single"].insert(0, begin)
    pipeline["post_processor"]["special_tokens"] = {"<pad>": {"id": "<pad>", "ids": [0], "tokens": ["<pad>"]}}
    (folder / "tokenizer.json").write_text(json.dumps(pipeline))
    tokenizer = load_tokenizer(folder)
    config = JsonlConfig(path=Path("unused.jsonl"), apply_chat_template=False)
    assert ids_of(config, Prompt(prompt_id="a", pass_index=0, text="5"), tokenizer) == [0, 7]
    with pytest.raises(UserError, match=r"prompt b starts with two beginning-of-sequence tokens \(0\)"):
        ids_of(config, Prompt(prompt_id="b", pass_index=0, text="<pad>5"), tokenizer)


def test_a_group_shares_one_read_only_prompt():
    envs = build_envs(
        ArithmeticConfig(), Prompt(prompt_id="a", pass_index=0, text="1="), load_tokenizer(WORKLOAD / "model"), 3
    )
    assert [env.name for env in envs] == ["arithmetic"] * 3
    assert len({id(env) for env in envs}) == 3
    with pytest.raises(ValueError, match="read-only"):
        envs[0].prompt_ids()[0] = 1
