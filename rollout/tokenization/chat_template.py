"""Rendering of a model's own chat template, as Hugging Face does it. It knows templates and text, never tokens."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollout.errors import UserError, boundary
from rollout.types.prompts import Message


class _GenerationBlock(Extension):
    """`{% generation %}` marks the policy's words for masking; rendering passes its body through."""

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja as it is

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. `render` gives what `apply_chat_template(..., add_generation_prompt=True)` gives before
    tokenisation."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str) -> None:
        """Compile `source`.

        Args:
            special_tokens: `bos_token`, `eos_token`, ...: visible to the template under these names.
            origin: the file it comes from, for messages.

        Raises:
            UserError: the template does not compile.
        """
        self._special_tokens = dict(special_tokens)
        self._origin = origin
        with boundary(UserError, f"the chat template of {origin} does not compile"):
            self._template = _environment().from_string(source)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as text, up to where the policy's answer starts.

        Raises:
            UserError: the template refuses the messages (for example a role that it does not know).
        """
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        roles = [message.role for message in messages]
        with boundary(
            UserError,
            f"the chat template of {self._origin} refused messages with the roles {roles}; give it roles that it knows",
        ):
            return self._template.render(
                messages=conversation, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    added: dict[str, Callable[..., str]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(added)
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: str) -> str:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, which Jinja's own filter would put in."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
