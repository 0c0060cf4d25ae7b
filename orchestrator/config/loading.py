"""From TOML and `--set a.b=c` to a config; what does not fit is named with its key."""

import difflib
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast, get_args

from pydantic import BaseModel, ValidationError

from orchestrator.config.run import RunConfig
from rollout.errors import UserError


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML config and apply `a.b=c` overrides (values in TOML syntax; bare words are strings).

    Raises:
        UserError: the file cannot be read, is no TOML, or does not fit the schema; each problem is named with its key.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as cause:
        raise UserError(
            f"cannot read config {path}: {cause.strerror}; give the path of a TOML file, such as "
            "examples/quickstart.toml"
        ) from cause
    except tomllib.TOMLDecodeError as cause:
        raise UserError(f"config {path} is not valid TOML: {cause}") from cause
    return parse_config(document, str(path), overrides)


def parse_config(document: dict[str, object], source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Validate a config document after `overrides`; `source` names it in errors.

    Raises:
        UserError: as for `load_config`.
    """
    for override in overrides:
        _apply_override(document, override)
    try:
        return RunConfig.model_validate(document)
    except ValidationError as cause:
        lines = [_explain(each["type"], each["loc"], each["msg"], each["input"]) for each in cause.errors()]
        raise UserError(f"config {source}:\n" + "\n".join(f"  {line}" for line in lines)) from cause


def _apply_override(document: dict[str, object], override: str) -> None:
    key, equals, raw = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"got --set {override!r}; expected the form section.key=value, such as --set run.steps=20")
    try:
        value: object = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    node = document
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            raise UserError(f"got --set {override!r}, but {part!r} is a value in the config, not a section")
        node = cast("dict[str, object]", child)
    node[parts[-1]] = value


def _explain(kind: str, location: tuple[int | str, ...], message: str, given: object) -> str:
    names = [str(part) for part in location]
    keys, models = _place(names)
    key = ".".join(keys)
    if kind == "extra_forbidden":
        known = sorted({field for model in _place(names[:-1])[1] for field in model.model_fields})
        near = difflib.get_close_matches(names[-1], known, n=1, cutoff=0.0)
        return f"{key}: unknown key; the nearest known key is {near[0]!r}" if near else f"{key}: unknown key"
    if kind == "union_tag_not_found":
        kinds = ", ".join(repr(str(model.model_fields["type"].default)) for model in models)
        return f"{key}: its kind is missing; set {key}.type to one of {kinds}"
    shown = "" if isinstance(given, dict) else f" (got {json.dumps(given, default=str)})"
    return f"{key or 'config'}: {message.removeprefix('Value error, ')}{shown}"


def _place(names: Sequence[str]) -> tuple[list[str], list[type[BaseModel]]]:
    """The keys of a location, without the tags that pydantic puts into it (`engine.vllm.dtype` -> `engine.dtype`), and
    the models that may stand there: several where a union has no tag yet."""
    keys: list[str] = []
    models: list[type[BaseModel]] = [RunConfig]
    for name in names:
        if len(models) != 1:
            models = [model for model in models if model.model_fields["type"].default == name] or models
            continue
        keys.append(name)
        if name in models[0].model_fields:
            models = list(_models_in(models[0].model_fields[name].annotation))
    return keys, models


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
