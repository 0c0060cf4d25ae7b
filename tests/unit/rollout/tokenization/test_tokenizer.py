"""Text and token ids: what the model's own files say, exactly; and what is refused rather than guessed."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paths import ROOT

from rollout.errors import UserError
from rollout.published.digests import canonical_json, json_digest
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.prompts import Message

WORKLOAD = ROOT / "benchmarks" / "workload"
MODEL = WORKLOAD / "model"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}{% "
    "generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt "
    "%}={% endif %}"
)
"""Characters of the workload's vocabulary only; `\\n` is none of them."""


@pytest.fixture
def model_dir(tmp_path: Path):
    """A copy of the workload's model directory, weights apart, that a test may change."""
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy, ignore=shutil.ignore_patterns("*.safetensors"), copy_function=shutil.copyfile)
    copy.chmod(0o755)
    return copy


def edit(path: Path, **changes: object):
    """Set keys of a JSON file; None takes a key out."""
    value = json.loads(path.read_text()) if path.exists() else {}
    value = {key: entry for key, entry in {**value, **changes}.items() if entry is not None}
    path.write_text(json.dumps(value))


def test_prompts_of_the_fixed_workload_get_its_token_ids():
    tokenizer = load_tokenizer(MODEL)
    rows = [json.loads(line) for line in (WORKLOAD / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 6400
    for row in rows:
        ids = tokenizer.encode(row["prompt"])
        assert ids.dtype == np.int32
        assert ids.tolist() == row["prompt_token_ids"]


def test_decoding_leaves_special_tokens_out_only_when_asked():
    tokenizer = load_tokenizer(MODEL)
    ids = np.array([8, 6, 1], dtype=np.int32)
    assert tokenizer.decode(ids) == "64"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "64<eos>"


def test_the_text_of_a_special_token_is_that_token():
    assert load_tokenizer(MODEL).encode("1<eos>2").tolist() == [3, 1, 4]


def test_truncation_and_padding_baked_into_the_file_never_touch_a_prompt(model_dir: Path):
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 9},
        "direction": "Left",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    edit(model_dir / "tokenizer.json", truncation=truncation, padding=padding)
    assert load_tokenizer(model_dir).encode("41+19=").tolist() == [6, 3, 12, 3, 11, 14]


def test_end_tokens_are_those_of_the_generation_config_and_the_tokenizer(model_dir: Path):
    edit(model_dir / "generation_config.json", eos_token_id=[14, 5, 14])
    assert load_tokenizer(model_dir).eos_ids == (14, 5, 1)


def test_without_a_generation_config_the_models_config_names_the_end_token(model_dir: Path):
    (model_dir / "generation_config.json").unlink()
    edit(model_dir / "tokenizer_config.json", eos_token=None)
    edit(model_dir / "config.json", eos_token_id=7)
    assert load_tokenizer(model_dir).eos_ids == (7,)


BEGIN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<pad>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<pad>": {"id": "<pad>", "ids": [0], "tokens": ["<pad>"]}},
}
"""A post-processor that puts `<pad>` in front."""


def test_the_files_post_processor_stands_in_front_of_raw_prompts_and_not_of_chats(model_dir: Path):
    edit(model_dir / "tokenizer.json", post_processor=BEGIN)
    edit(model_dir / "tokenizer_config.json", add_bos_token=False, bos_token="<pad>")
    (model_dir / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}=")
    tokenizer = load_tokenizer(model_dir)
    assert tokenizer.encode("12").tolist() == [0, 3, 4]
    assert tokenizer.render_chat([Message(role="user", content="12")]).tolist() == [0, 3, 4, 14]


def test_a_chat_is_rendered_by_the_models_template_up_to_the_policys_answer(model_dir: Path):
    assert not load_tokenizer(model_dir).has_chat_template
    (model_dir / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(model_dir)
    assert tokenizer.has_chat_template
    chat = [Message(role="system", content="12"), Message(role="user", content="3+4")]
    assert tokenizer.render_chat(chat).tolist() == [
        3,
        4,
        1,
        0,
        5,
        12,
        6,
        1,
        0,
        14,
    ]  # 0: the newline, unknown to this vocabulary


def test_a_template_in_the_tokenizers_config_counts_and_the_file_beside_it_wins(model_dir: Path):
    named = [{"name": "tool_use", "template": "+"}, {"name": "default", "template": "="}]
    edit(model_dir / "tokenizer_config.json", chat_template=named)
    user = [Message(role="user", content="1")]
    assert load_tokenizer(model_dir).render_chat(user).tolist() == [14]
    (model_dir / "chat_template.jinja").write_text("*")
    assert load_tokenizer(model_dir).render_chat(user).tolist() == [15]


def test_the_digest_of_the_template_is_empty_without_one(model_dir: Path):
    assert load_tokenizer(model_dir).chat_template_digest() == ""
    (model_dir / "chat_template.jinja").write_text(TEMPLATE)
    assert load_tokenizer(model_dir).chat_template_digest() == json_digest(TEMPLATE)


def test_a_copy_of_the_model_has_the_same_fingerprint(model_dir: Path):
    assert load_tokenizer(model_dir).fingerprint() == load_tokenizer(MODEL).fingerprint()


def set_added_token_flag(model_dir: Path):
    tokens = json.loads((model_dir / "tokenizer.json").read_text())["added_tokens"]
    edit(model_dir / "tokenizer.json", added_tokens=[tokens[0], {**tokens[1], "lstrip": True}])


def swap_two_letters(model_dir: Path):
    model = json.loads((model_dir / "tokenizer.json").read_text())["model"]
    model["vocab"]["a"], model["vocab"]["b"] = model["vocab"]["b"], model["vocab"]["a"]
    edit(model_dir / "tokenizer.json", model=model)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("vocab", swap_two_letters),
        ("normalizer", lambda d: edit(d / "tokenizer.json", normalizer={"type": "Lowercase"})),
        ("pre_tokenizer", lambda d: edit(d / "tokenizer.json", pre_tokenizer={"type": "Whitespace"})),
        ("post_processor", lambda d: edit(d / "tokenizer.json", post_processor=None)),
        ("added_tokens", set_added_token_flag),
        ("special_ids", lambda d: edit(d / "config.json", bos_token_id=3)),
        ("eos_ids", lambda d: edit(d / "generation_config.json", eos_token_id=[1, 14])),
        ("chat_template", lambda d: edit(d / "tokenizer_config.json", chat_template="{{ messages }}")),
    ],
)
def test_the_fingerprint_names_the_one_field_in_which_two_tokenizers_differ(
    model_dir: Path, field: str, change: Callable[[Path], None]
):
    before = load_tokenizer(model_dir)
    change(model_dir)
    after = load_tokenizer(model_dir)
    old, new = before.fingerprint_fields(), after.fingerprint_fields()
    assert [name for name in old if old[name] != new[name]] == [field]
    assert after.fingerprint() != before.fingerprint()


def test_digests_are_taken_over_the_canonical_form_of_vector_v20(golden: dict[str, Any]):
    vector = golden["V20_fingerprint"]
    document = {
        "vocab": {"a": 0, "b": 1, "<s>": 2},
        "special_tokens": {"bos_token_id": 2},
        "chat_template": "{{x}}",
        "added": ["<s>"],
    }
    assert canonical_json(document).decode() == vector["canonical"]
    assert json_digest(document) == vector["sha256"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "does not exist; give a local Hugging Face model directory"),
        (lambda d: (d / "tokenizer.json").unlink(), r"has no tokenizer.json; write it with .*save_pretrained"),
        (lambda d: (d / "tokenizer.json").write_text("{"), r"cannot read .*tokenizer.json; restore"),
        (lambda d: (d / "tokenizer_config.json").write_text("{"), r"cannot read .*tokenizer_config.json.*restore"),
        (lambda d: (d / "config.json").write_text("[]"), r"config.json holds a JSON list; expected an object"),
        (lambda d: edit(d / "config.json", vocab_size=31), r"ids up to 31, but the model's embedding has 31 rows"),
        (
            lambda d: edit(d / "generation_config.json", eos_token_id="<eos>"),
            r"eos_token_id of .* is '<eos>'; expected a token id",
        ),
        (
            lambda d: edit(d / "generation_config.json", eos_token_id=32),
            r"names end tokens \(32, 1\), but its vocabulary ends at 31",
        ),
        (
            lambda d: edit(d / "tokenizer_config.json", eos_token="</s>"),
            r"names eos_token '</s>', which tokenizer.json does not hold",
        ),
        (
            lambda d: edit(d / "tokenizer_config.json", added_tokens_decoder={"32": {"content": "<tool>"}}),
            r"'<tool>' has id 32, but tokenizer.json gives it None",
        ),
        (
            lambda d: edit(d / "tokenizer_config.json", add_bos_token="yes"),
            r"add_bos_token of .* is 'yes'; expected true or false",
        ),
        (
            lambda d: (d / "chat_template.jinja").write_text("{% if %}"),
            r"chat template of .* does not compile: TemplateSyntaxError",
        ),
    ],
)
def test_a_broken_model_directory_is_a_user_error_with_the_cure(
    model_dir: Path, change: Callable[[Path], object], message: str
):
    change(model_dir)
    with pytest.raises(UserError, match=message):
        load_tokenizer(model_dir)


def test_a_model_without_any_end_token_is_refused(model_dir: Path):
    edit(model_dir / "generation_config.json", eos_token_id=None)
    edit(model_dir / "config.json", eos_token_id=None)
    edit(model_dir / "tokenizer_config.json", eos_token=None)
    with pytest.raises(UserError, match="names no end token"):
        load_tokenizer(model_dir)


def test_messages_without_a_template_and_roles_that_it_refuses_are_user_errors(model_dir: Path):
    with pytest.raises(UserError, match=r"no chat template; add chat_template\.jinja"):
        load_tokenizer(model_dir).render_chat([Message(role="user", content="1")])
    (model_dir / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(UserError, match=r"refused messages with the roles \['robot'\].*no robots"):
        load_tokenizer(model_dir).render_chat([Message(role="robot", content="1")])


def test_a_template_cannot_reach_into_python(model_dir: Path):
    (model_dir / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(UserError, match="SecurityError"):
        load_tokenizer(model_dir).render_chat([Message(role="user", content="1")])


def test_prompts_rewards_and_episodes_load_without_torch_and_transformers():
    code = (
        "import sys, rollout.episodes.episode, rollout.environments.registry, rollout.rewards.registry; from "
        f"rollout.tokenization.tokenizer import load_tokenizer; load_tokenizer({str(MODEL)!r}); "
        "print(sorted({'torch', 'transformers', 'ray', 'vllm', 'pyarrow', 'sympy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
