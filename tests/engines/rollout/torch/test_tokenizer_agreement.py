"""Our tokenizer gives what transformers' AutoTokenizer gives: raw prompts, chats and text, for character, byte-pair and
template-heavy models."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from support.paths import MODEL
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.prompts import Message

TEXTS = [
    "41+19=",
    "",
    " a  b\n\tc ",
    "naïve café 🙂 中文",
    "<s>x</s><tool>",
    '{"name": "f", "arguments": {"x": [1, 2.5]}}',
    "1<eos>2",
    "Hello, world's end",
]
CHAT = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="What's 2+2?\n"),
    Message(role="assistant", content="4"),
    Message(role="user", content="é?"),
]
TEMPLATE = """{%- set ns = namespace(first=true) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|' + message.role + '|>' }}{% generation %}{{ message.content | trim }}{% endgeneration %}{{-
            eos_token + '\n' }}
        {%- continue %}
    {%- endif %}
    {{- (bos_token if ns.first else '') + '<|' + message.role + '|>' + message.content
        + ({'n': loop.index0} | tojson) + '\n' }}
    {%- set ns.first = false %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def byte_pairs(folder: Path, settings: dict[str, object]):
    """A byte-level model with added tokens, an NFC normalizer and a beginning-of-sequence post-processor."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<tool>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.enable_truncation(3)
    backend.save(str(folder / "tokenizer.json"))
    base = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**base, **settings}))
    return folder


def characters(folder: Path, settings: dict[str, object]):
    """The fixed workload's model with a chat template."""
    shutil.copytree(
        MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"), copy_function=shutil.copyfile, dirs_exist_ok=True
    )
    folder.chmod(0o755)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<pad>", **settings}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.parametrize(
    ("build", "settings"),
    [
        (characters, {}),
        (byte_pairs, {}),
        (byte_pairs, {"add_bos_token": False}),
        (byte_pairs, {"add_bos_token": True, "add_eos_token": True}),
    ],
)
def test_ids_text_and_chats_are_those_of_transformers(
    tmp_path: Path, build: Callable[[Path, dict[str, object]], Path], settings: dict[str, object]
):
    from transformers import AutoTokenizer

    folder = build(tmp_path, settings)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids.tolist() == theirs(text)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    rendered = theirs.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in CHAT], add_generation_prompt=True, return_dict=False
    )
    np.testing.assert_array_equal(ours.render_chat(CHAT), rendered)
    assert ours.vocab_size == len(theirs)
    assert theirs.eos_token_id in ours.eos_ids
