"""Text to token ids and back, and the fingerprint by which two sides prove that they tokenize alike. It must never
re-tokenise sampled ids."""

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend

from rollout.errors import UserError, boundary
from rollout.published.digests import json_digest
from rollout.tokenization.chat_template import ChatTemplate
from rollout.tokenization.files import TokenizerFiles, read_tokenizer_files
from rollout.types.prompts import Message


class Tokenizer(Protocol):
    """What environments and episodes ask of a tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens after which a sample stops; never empty."""
        ...

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        ...

    def encode(self, text: str) -> NDArray[np.int32]:
        """[P] ids of raw text, with the special tokens that the model's tokenizer adds."""
        ...

    def decode(self, ids: NDArray[np.int32], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        ...

    def render_chat(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """[P] ids of a conversation up to where the policy's answer starts."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 over `fingerprint_fields`."""
        ...

    def fingerprint_fields(self) -> dict[str, str]:
        """Field -> SHA-256 of its canonical JSON; two tokenizers differ in the fields whose digests differ."""
        ...

    def chat_template_digest(self) -> str:
        """SHA-256 of the chat template, empty without one."""
        ...


def load_tokenizer(model_dir: Path | str) -> "HuggingFaceTokenizer":
    """The tokenizer of a local Hugging Face model directory, from its `tokenizer.json` (no transformers, no torch).

    Raises:
        UserError: a file is missing or broken, no end token is named anywhere, the files disagree, or the vocabulary is
            larger than the model's embedding.
    """
    files = read_tokenizer_files(Path(model_dir))
    path = files.model_dir / "tokenizer.json"
    if not path.is_file():
        raise UserError(
            f'{files.model_dir} has no tokenizer.json; write it with python -c "from transformers import AutoTokenizer'
            f" as A; A.from_pretrained('{files.model_dir}').save_pretrained('{files.model_dir}')\""
        )
    with boundary(UserError, f"cannot read {path}; restore the file from the model's source"):
        backend = Backend.from_file(str(path))
    return HuggingFaceTokenizer(backend, files)


class HuggingFaceTokenizer:
    """A `tokenizers` pipeline with the side files of its model."""

    def __init__(self, backend: Backend, files: TokenizerFiles) -> None:
        """Take `backend` over. A truncation or padding baked into it is switched off: a prompt is never shortened
        silently."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._files = files
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        _check_declared(backend, files)
        self.bos_id = self._special_id("bos_token")
        self.eos_ids = self._find_eos_ids()
        _check_embedding(files, self.vocab_size, self.eos_ids)
        template = files.chat_template
        self._chat_template = (
            None if template is None else ChatTemplate(template, files.special_tokens, str(files.model_dir))
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that structure a text and are no text themselves."""
        return frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )

    @property
    def pad_ids(self) -> tuple[int, ...]:
        """Ids that texts may be padded with, the likeliest first: the pad token by name, that of config.json, and the
        end tokens, which many use."""
        text, named = self._files.special_tokens.get("pad_token"), self._files.model_ids.get("pad_token_id")
        ids = (None if text is None else self._backend.token_to_id(text), named, *self.eos_ids)
        return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))

    def encode(self, text: str) -> NDArray[np.int32]:
        """[P] ids of raw text, with the special tokens that the post-processor of tokenizer.json adds; as in
        transformers, it outranks `add_bos_token`."""
        return np.array(self._backend.encode(text, add_special_tokens=True).ids, dtype=np.int32)

    def decode(self, ids: NDArray[np.int32], skip_special_tokens: bool = True) -> str:
        """The text of `ids` [n] as the tokenizer's decoder gives it, without any clean-up of spaces."""
        return self._backend.decode(cast(list[int], ids.tolist()), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Message]) -> NDArray[np.int32]:
        """[P] ids of a conversation up to where the policy's answer starts. The template writes its special tokens
        itself: none is added.

        Raises:
            UserError: there is no chat template, or it refuses the messages.
        """
        if self._chat_template is None:
            raise UserError(
                f"got chat messages, but the tokenizer of {self._files.model_dir} has no chat template; add "
                "chat_template.jinja there or give raw prompts"
            )
        text = self._chat_template.render(messages)
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def fingerprint(self) -> str:
        return json_digest(self.fingerprint_fields())

    def fingerprint_fields(self) -> dict[str, str]:
        return dict(self._fields)

    def chat_template_digest(self) -> str:
        """SHA-256 of the canonical JSON of the chat template, empty without one."""
        return "" if self._files.chat_template is None else json_digest(self._files.chat_template)

    @cached_property
    def _fields(self) -> dict[str, str]:
        pipeline = cast(dict[str, object], json.loads(self._backend.to_str()))
        model = cast(dict[str, object], pipeline["model"])
        special_ids = {name: self._backend.token_to_id(text) for name, text in self._files.special_tokens.items()}
        fields: dict[str, object] = {
            "vocab": model.pop("vocab", None),
            "merges": model.pop("merges", None),
            "model": model,
            **{name: pipeline[name] for name in ("normalizer", "pre_tokenizer", "post_processor", "added_tokens")},
            "special_ids": {"tokenizer": special_ids, "model": self._files.model_ids},
            "eos_ids": list(self.eos_ids),
            "chat_template": self._files.chat_template,
            "add_bos_eos": [self._files.add_bos, self._files.add_eos],
        }
        return {name: json_digest(value) for name, value in fields.items()}

    def _special_id(self, name: str) -> int | None:
        text = self._files.special_tokens.get(name)
        if text is None:
            return None
        token_id = self._backend.token_to_id(text)
        if token_id is None:
            raise UserError(
                f"tokenizer_config.json of {self._files.model_dir} names {name} {text!r}, which tokenizer.json does not"
                f" hold; save the tokenizer again, or correct {name}"
            )
        return token_id

    def _find_eos_ids(self) -> tuple[int, ...]:
        own = self._special_id("eos_token")
        ids: tuple[int, ...] = tuple(dict.fromkeys((*self._files.eos_ids, *(() if own is None else (own,)))))
        if not ids:
            raise UserError(
                f"{self._files.model_dir} names no end token: neither eos_token_id in generation_config.json or "
                "config.json nor eos_token in tokenizer_config.json; set one, else no sample can stop"
            )
        return ids


def _check_declared(backend: Backend, files: TokenizerFiles) -> None:
    """Tokens that tokenizer_config.json alone declares would be encoded by transformers and not by us: refuse rather
    than differ."""
    for token_id, text in files.declared_tokens.items():
        held = backend.token_to_id(text)
        if held != token_id:
            raise UserError(
                f"tokenizer_config.json of {files.model_dir} says that token {text!r} has id {token_id}, but "
                f"tokenizer.json gives it {held}; save the tokenizer again so that both agree"
            )


def _check_embedding(files: TokenizerFiles, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
    rows = files.embedding_rows
    if rows is not None and vocab_size > rows:
        raise UserError(
            f"the tokenizer of {files.model_dir} has ids up to {vocab_size - 1}, but the model's embedding has {rows} "
            "rows (vocab_size in config.json); use the model's own tokenizer, or resize the embedding"
        )
    limit = vocab_size if rows is None else rows
    if max(eos_ids) >= limit:
        raise UserError(
            f"{files.model_dir} names end tokens {eos_ids}, but its vocabulary ends at {limit - 1}; correct "
            "eos_token_id in generation_config.json"
        )
