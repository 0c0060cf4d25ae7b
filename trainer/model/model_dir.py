"""What a local model directory promises, read without torch: the command line checks it before anything starts."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rollout.errors import UserError
from rollout.published.tensor_files import tensor_spans, weight_files

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the rest of Concord needs to know of a model before it is loaded."""

    architecture: str
    vocab_size: int
    """Rows of the embedding."""
    tokenizer_size: int
    """Largest token id of the tokenizer + 1; never more than `vocab_size`."""
    max_context: int | None
    """Tokens of the longest sequence; None where the config does not say."""
    is_moe: bool
    tied: bool
    """Whether the head shares the embedding's weight, so that no head is stored."""
    num_parameters: int
    weight_bytes: int


def check_model_dir(path: Path) -> ModelFacts:
    """Read config, tokenizer and the headers of the weight files.

    Raises:
        UserError: one of them is missing, broken, or contradicts another; the message holds the cure.
    """
    if not path.is_dir():
        what = "is not a directory" if path.exists() else "does not exist"
        raise UserError(
            f"model directory {path} {what}; give a local directory with a Hugging Face causal LM (`concord tiny OUT` "
            "makes a small one)"
        )
    config = _read_object(path / "config.json", "save the model with `save_pretrained`")
    text = config.get("text_config")
    inner = config | cast(dict[str, object], text) if isinstance(text, dict) else config
    vocab_size = _integer(inner, ("vocab_size",))
    if vocab_size is None:
        raise UserError(f"{path / 'config.json'} has no vocab_size; expected the config of a Hugging Face causal LM")
    tokenizer_size = _tokenizer_size(path)
    if tokenizer_size > vocab_size:
        raise UserError(
            f"the tokenizer of {path} has ids up to {tokenizer_size - 1} but the embedding has {vocab_size} rows; "
            f"resize the model (`model.resize_token_embeddings({tokenizer_size})`) and save it again, or use the "
            "model's own tokenizer"
        )
    spans = [span for file in weight_files(path) for span in tensor_spans(file)]
    architectures = cast(list[str], config.get("architectures") or [str(config.get("model_type", "unknown"))])
    return ModelFacts(
        architecture=architectures[0],
        vocab_size=vocab_size,
        tokenizer_size=tokenizer_size,
        max_context=_integer(inner, _CONTEXT_KEYS),
        is_moe=(_integer(inner, _EXPERT_KEYS) or 0) > 1,
        tied=bool(config.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))),
        num_parameters=sum(math.prod(span.shape) for span in spans),
        weight_bytes=sum(span.end - span.start for span in spans),
    )


def _tokenizer_size(path: Path) -> int:
    cure = "save the tokenizer beside the model: `AutoTokenizer.from_pretrained(SOURCE).save_pretrained(DIRECTORY)`"
    tokenizer = _read_object(path / "tokenizer.json", cure)
    model = tokenizer.get("model")
    vocabulary: object = cast(dict[str, object], model).get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        ids = [int(i) for i in cast(dict[str, int], vocabulary).values()]
    elif isinstance(vocabulary, list):
        ids = list(range(len(cast(list[object], vocabulary))))
    else:
        raise UserError(f"{path / 'tokenizer.json'} has no model.vocab; {cure}")
    ids += [int(token["id"]) for token in cast(list[dict[str, int]], tokenizer.get("added_tokens") or [])]
    return max(ids, default=-1) + 1


def _read_object(path: Path, cure: str) -> dict[str, object]:
    try:
        value: object = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"model directory {path.parent} has no {path.name}; {cure}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); {cure}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__}, expected an object; {cure}")
    return cast(dict[str, object], value)


def _integer(config: dict[str, object], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int):
            return value
    return None
