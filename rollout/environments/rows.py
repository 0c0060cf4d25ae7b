"""From one row of a prompt file to a checked task. It knows columns and types, never files or order."""

import json
from collections.abc import Mapping
from typing import cast

from rollout.config import JsonlConfig
from rollout.errors import UserError
from rollout.published.digests import canonical_json
from rollout.types.prompts import Message, Prompt


def parse_row(row: Mapping[str, object], number: int, place: str, config: JsonlConfig, require_answer: bool) -> Prompt:
    """Check one row; the task as a prompt of pass 0.

    Args:
        row: column -> value; a null counts as absent.
        number: the row's, from 0: its id where it names none.
        place: file and line, for messages.
        require_answer: the reward compares with the answer, so that a row without one is an error.

    Raises:
        UserError: naming `place`, what was got and what was expected.
    """
    present = {name: value for name, value in row.items() if value is not None}
    text, messages = _task(present, place, config)
    if require_answer and config.answer_key not in present:
        raise UserError(
            f"{place}: no {config.answer_key!r}, which the reward compares with; {_found(present)}. Add it, or set "
            "environment.answer_key"
        )
    prompt_id = _scalar_text(present, config.id_key, place)
    used = {config.id_key, config.prompt_key, config.messages_key, config.answer_key}
    return Prompt(
        pass_index=0,
        prompt_id=str(number) if prompt_id is None else prompt_id,
        text=text,
        messages=messages,
        answer=_scalar_text(present, config.answer_key, place),
        metadata=tuple((name, _metadata_text(value)) for name, value in sorted(present.items()) if name not in used),
    )


def _task(present: Mapping[str, object], place: str, config: JsonlConfig) -> tuple[str | None, tuple[Message, ...]]:
    """(text, ()) or (None, messages)."""
    keys = {key for key in (config.prompt_key, config.messages_key) if key in present}
    if not keys:
        missing = f"{place}: neither {config.prompt_key!r} nor {config.messages_key!r}; {_found(present)}"
        raise UserError(f"{missing}. Set environment.prompt_key or environment.messages_key")
    if len(keys) == 2:
        raise UserError(f"{place}: both {config.prompt_key!r} and {config.messages_key!r}; give one of them")
    key = keys.pop()
    value = present[key]
    if key == config.messages_key and isinstance(value, list):
        system = () if config.system_prompt is None else (Message(role="system", content=config.system_prompt),)
        return None, (*system, *_messages(cast(list[object], value), key, place))
    if key != config.prompt_key or not isinstance(value, str):
        wanted = f"a string (for a list of messages set environment.messages_key = {key!r})"
        if key == config.messages_key:
            wanted = "a list of messages"
        raise UserError(f"{place}: {key!r} is {_shown(value)}; expected {wanted}")
    if not value:
        raise UserError(f"{place}: {key!r} is empty; a prompt needs at least one character")
    if config.system_prompt is not None:
        cure = f"give {config.messages_key!r} instead of {key!r}, or leave system_prompt out"
        raise UserError(f"{place}: a raw prompt, but environment.system_prompt is set; {cure}")
    return value, ()


def _messages(value: list[object], key: str, place: str) -> tuple[Message, ...]:
    if not value:
        raise UserError(f"{place}: {key!r} is empty; expected at least one message")
    return tuple(_message(entry, f"{place}: message {index} of {key!r}") for index, entry in enumerate(value))


def _message(entry: object, place: str) -> Message:
    fields = cast(dict[str, object], entry) if isinstance(entry, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    unknown = sorted(name for name, field in fields.items() if name not in ("role", "content") and field is not None)
    if not isinstance(role, str) or not role or not isinstance(content, str) or unknown:
        raise UserError(
            f'{place} is {_shown(cast(object, entry))}; expected {{"role": "user", "content": "..."}} with two strings'
            " and no further keys"
        )
    return Message(role=role, content=content)


def _scalar_text(present: Mapping[str, object], key: str, place: str) -> str | None:
    """A string as it is; a number as JSON writes it; None where the column is absent."""
    value = present.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    raise UserError(f"{place}: {key!r} is {_shown(value)}; expected a string or a number")


def _metadata_text(value: object) -> str:
    as_json = isinstance(value, bool | int | float | list | dict)
    return canonical_json(cast(object, value)).decode() if as_json else str(value)


def _found(present: Mapping[str, object]) -> str:
    return f"found the columns {', '.join(sorted(present)) or 'none'}"


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
