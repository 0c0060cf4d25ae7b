"""What a model directory says about its tokenizer besides `tokenizer.json`: special tokens, end tokens, chat template.
It encodes nothing."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rollout.errors import UserError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NAMED_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """The side files of one model directory, read once."""

    model_dir: Path
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token`, ... -> text, where named."""
    declared_tokens: dict[int, str]
    """Token id -> text of tokens that tokenizer_config.json says were added."""
    add_bos: bool | None
    """`add_bos_token` of tokenizer_config.json, None where it does not say. Declared only: the post-processor of
    tokenizer.json decides."""
    add_eos: bool | None
    eos_ids: tuple[int, ...]
    """End tokens of generation_config.json, else of config.json. The tokenizer's own end token is not yet among
    them."""
    chat_template: str | None
    embedding_rows: int | None
    """`vocab_size` of config.json, None where it does not say."""
    model_ids: dict[str, object]
    """Special ids that config.json names."""
    sampling: dict[str, float]
    """`temperature`, `top_p`, `top_k` of generation_config.json, where it says: what engines take that are not told
    otherwise."""


def read_tokenizer_files(model_dir: Path) -> TokenizerFiles:
    """Read the side files; each of them may be absent.

    Raises:
        UserError: the directory is missing, or one of the files is broken.
    """
    if not model_dir.is_dir():
        what = "is not a directory" if model_dir.exists() else "does not exist"
        raise UserError(f"got model directory {model_dir}, which {what}; give a local Hugging Face model directory")
    settings = _read_json(model_dir / "special_tokens_map.json") | _read_json(model_dir / "tokenizer_config.json")
    config = _read_json(model_dir / "config.json")
    generation = _read_json(model_dir / "generation_config.json")
    text_config = config.get("text_config")
    inner = config | cast(dict[str, object], text_config) if isinstance(text_config, dict) else config
    rows = inner.get("vocab_size")
    return TokenizerFiles(
        model_dir=model_dir,
        special_tokens={name: text for name in _NAMED_TOKENS if (text := _token_text(settings.get(name))) is not None},
        declared_tokens=_declared_tokens(settings, model_dir),
        add_bos=_flag(settings, "add_bos_token", model_dir),
        add_eos=_flag(settings, "add_eos_token", model_dir),
        eos_ids=_eos_ids(generation, model_dir / "generation_config.json")
        or _eos_ids(inner, model_dir / "config.json"),
        chat_template=_chat_template(settings, model_dir),
        embedding_rows=rows if isinstance(rows, int) else None,
        model_ids={name: inner[name] for name in _NAMED_IDS if name in inner},
        sampling={
            name: value
            for name in ("temperature", "top_p", "top_k")
            if isinstance(value := generation.get(name), int | float) and not isinstance(value, bool)
        },
    )


def _read_json(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as cause:
        raise UserError(f"cannot read {path}: {cause}; restore the file from the model's source") from cause
    if not isinstance(value, dict):
        raise UserError(
            f"{path} holds a JSON {type(value).__name__}; expected an object: restore the file from the model's source"
        )
    return cast(dict[str, object], value)


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = cast(dict[str, object], value).get("content")
    return value if isinstance(value, str) else None


def _declared_tokens(settings: dict[str, object], model_dir: Path) -> dict[int, str]:
    declared = settings.get("added_tokens_decoder", {})
    if not isinstance(declared, dict):
        raise UserError(
            f"added_tokens_decoder of {model_dir / 'tokenizer_config.json'} is a {type(declared).__name__}; expected an"
            " object"
        )
    texts = {key: _token_text(value) for key, value in cast(dict[str, object], declared).items()}
    return {int(key): text for key, text in texts.items() if key.isdigit() and text is not None}


def _flag(settings: dict[str, object], name: str, model_dir: Path) -> bool | None:
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{name} of {model_dir / 'tokenizer_config.json'} is {value!r}; expected true or false")
    return value


def _eos_ids(settings: dict[str, object], path: Path) -> tuple[int, ...]:
    value = settings.get("eos_token_id")
    if value is None:
        return ()
    ids = cast(list[object], value) if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise UserError(f"eos_token_id of {path} is {value!r}; expected a token id or a list of them")
    return tuple(dict.fromkeys(cast(list[int], ids)))


def _chat_template(settings: dict[str, object], model_dir: Path) -> str | None:
    """`chat_template.jinja`, else the (default) template of tokenizer_config.json."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = settings.get("chat_template")
    if isinstance(value, list):
        named = [cast(dict[str, object], entry) for entry in cast(list[object], value) if isinstance(entry, dict)]
        value = next((entry.get("template") for entry in named if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None
