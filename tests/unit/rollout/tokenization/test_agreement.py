"""Two sides tokenize alike, or it is said in which field or probe they do not."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray
from support.paths import MODEL

from rollout.tokenization.agreement import OWN_SPECIAL_TOKENS, PROBES, REFUSED, TokenizerIdentity, differences, identify
from rollout.tokenization.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A copy of the workload's model directory, weights apart, that a test may change."""
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy, ignore=shutil.ignore_patterns("*.safetensors"), copy_function=shutil.copyfile)
    copy.chmod(0o755)
    return copy


def edit_model(model_dir: Path, **changes: object) -> None:
    """Set keys of `model` in tokenizer.json."""
    path = model_dir / "tokenizer.json"
    document = json.loads(path.read_text())
    document["model"].update(changes)
    path.write_text(json.dumps(document))


class Wrapped:
    """The workload's tokenizer under another version of its library: one probe text gets other ids, or another text
    back."""

    def __init__(self, probe: str, text: str | None = None) -> None:
        self._inner, self._probe, self._text = load_tokenizer(MODEL), probe, text
        self.eos_ids, self.bos_id = self._inner.eos_ids, self._inner.bos_id

    def encode(self, text: str) -> NDArray[np.int32]:
        ids = self._inner.encode(text)
        return ids[:-1] if text == PROBES[self._probe] and self._text is None else ids

    def decode(self, ids: NDArray[np.int32], skip_special_tokens: bool = True) -> str:
        text = self._inner.decode(ids, skip_special_tokens)
        return (
            self._text
            if self._text is not None and np.array_equal(ids, self._inner.encode(PROBES[self._probe]))
            else text
        )

    def fingerprint_fields(self) -> dict[str, str]:
        return self._inner.fingerprint_fields()


def test_a_copy_of_the_model_is_the_same_tokenizer_in_every_field_and_probe(model_dir: Path) -> None:
    expected, got = identify(load_tokenizer(MODEL)), identify(load_tokenizer(model_dir))
    assert got == expected
    assert differences(expected, got) == ()
    assert set(got.probes) == {*PROBES, OWN_SPECIAL_TOKENS}


def test_an_identity_survives_the_way_between_processes_and_agrees_with_the_tokenizers_own_fingerprint() -> None:
    tokenizer = load_tokenizer(MODEL)
    identity = identify(tokenizer)
    assert pickle.loads(pickle.dumps(identity)) == identity
    assert identity.fingerprint == tokenizer.fingerprint()


def test_another_chat_template_is_named_and_nothing_else_is(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages }}")
    assert differences(identify(load_tokenizer(MODEL)), identify(load_tokenizer(model_dir))) == ("chat_template",)


def test_swapped_letters_are_found_in_the_vocabulary_and_in_what_it_does_to_text(model_dir: Path) -> None:
    vocab = json.loads((model_dir / "tokenizer.json").read_text())["model"]["vocab"]
    edit_model(model_dir, vocab={**vocab, "a": vocab["b"], "b": vocab["a"]})
    names = differences(identify(load_tokenizer(MODEL)), identify(load_tokenizer(model_dir)))
    assert names[0] == "vocab" and "probe words" in names and "probe digits" not in names


@pytest.mark.parametrize("probe", ["digits", "tool_call", "special_text"])
def test_the_same_files_that_give_other_ids_are_told_by_the_probe(probe: str) -> None:
    other = cast(Tokenizer, Wrapped(probe))
    assert differences(identify(load_tokenizer(MODEL)), identify(other)) == (f"probe {probe}",)


def test_the_same_ids_that_decode_to_another_text_are_told_by_the_probe() -> None:
    other = cast(Tokenizer, Wrapped("digits", "12 34"))
    assert differences(identify(load_tokenizer(MODEL)), identify(other)) == ("probe digits",)


def test_texts_that_a_tokenizer_of_characters_cannot_encode_are_noted_and_crash_nothing(model_dir: Path) -> None:
    edit_model(model_dir, unk_token="[none]")
    identity = identify(load_tokenizer(model_dir))
    assert identity.probes["unicode"] == identity.probes["white_space"] == identity.probes["emoji"] == REFUSED
    assert identity.probes["empty"] != REFUSED
    assert identity.probes[OWN_SPECIAL_TOKENS] != REFUSED
    assert "probe emoji" in differences(identify(load_tokenizer(MODEL)), identity)


def test_what_only_one_side_has_counts_as_a_difference() -> None:
    mine = TokenizerIdentity(fingerprint_fields={"vocab": "a"}, probes={"digits": "b"})
    other = replace(mine, fingerprint_fields={"vocab": "a", "decoder": "c"}, probes={})
    assert differences(mine, other) == ("decoder", "probe digits")
    assert differences(other, mine) == ("decoder", "probe digits")


def test_the_probes_hold_what_tokenizers_are_known_to_differ_in() -> None:
    texts = "".join(PROBES.values())
    assert PROBES["empty"] == "" and PROBES["blank"] == " "
    for part in (
        "\u0301",
        "\u200d",
        "\t\t",
        "\n\n\n",
        "\r\n",
        "    ",
        "1234567",
        '"arguments": {',
        "<|im_end|>\n",
        "</s>",
    ):
        assert part in texts
