"""Bad model directories end in an error that names the cure, before anything starts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.trainer.trainer_room import write_bare_model

from rollout.errors import UserError
from trainer.model.model_dir import check_model_dir


def test_a_good_directory_tells_its_facts(tmp_path: Path):
    facts = check_model_dir(write_bare_model(tmp_path / "m", vocab_size=30, num_experts=4, tie_word_embeddings=True))
    assert (facts.architecture, facts.vocab_size, facts.tokenizer_size, facts.max_context) == (
        "Qwen3ForCausalLM",
        30,
        24,
        64,
    )
    assert (facts.is_moe, facts.tied, facts.num_parameters, facts.weight_bytes) == (True, True, 60, 240)


def test_added_tokens_count_as_ids(tmp_path: Path):
    model = write_bare_model(tmp_path / "m", vocab_size=40)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": [{"id": 39, "content": "<x>"}]}))
    assert check_model_dir(model).tokenizer_size == 40


def truncate(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])


def index_names_an_absent_file(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda m: (m / "config.json").unlink(), r"no config\.json; save the model"),
    "config is no JSON": (lambda m: (m / "config.json").write_text("{"), "not valid JSON"),
    "config is a list": (lambda m: (m / "config.json").write_text("[]"), "expected an object"),
    "config without vocabulary": (lambda m: (m / "config.json").write_text("{}"), "no vocab_size"),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), r"no tokenizer\.json; save the tokenizer"),
    "tokenizer without vocabulary": (lambda m: (m / "tokenizer.json").write_text('{"model": {}}'), r"no model\.vocab"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "save_pretrained"),
    "weights cut short": (truncate, "cut short"),
    "weights are something else": (lambda m: (m / "model.safetensors").write_bytes(b"PK" * 20), "does not fit"),
    "weights are empty": (lambda m: (m / "model.safetensors").write_bytes(b""), "does not fit"),
    "index names an absent file": (index_names_an_absent_file, "copy the model again"),
    "index is broken": (lambda m: (m / "model.safetensors.index.json").write_text("{}"), "weight_map"),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_directory_is_refused_with_the_cure(tmp_path: Path, case: str):
    model = write_bare_model(tmp_path / "m")
    damage, message = BROKEN[case]
    damage(model)
    with pytest.raises(UserError, match=message):
        check_model_dir(model)


def test_a_missing_directory_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        check_model_dir(tmp_path / "nowhere")


def test_a_file_is_no_model_directory(tmp_path: Path):
    (tmp_path / "m").write_text("")
    with pytest.raises(UserError, match="is not a directory"):
        check_model_dir(tmp_path / "m")


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"ids up to 23 but the embedding has 20 rows.*resize_token_embeddings\(24\)"):
        check_model_dir(write_bare_model(tmp_path / "m", vocab_size=20))
