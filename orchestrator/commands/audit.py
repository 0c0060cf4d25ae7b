"""The options of `concord audit`, one field each, and how such a class becomes a command. Imports nothing heavy."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TypeVar, get_type_hints

import typer

from orchestrator.audit.options import AuditOptions

_Options = TypeVar("_Options")


def command_of(options: type[_Options], act: Callable[[_Options], None]) -> Callable[..., None]:
    """A function whose parameters are the fields of a dataclass, as typer reads them off a signature."""
    hints = get_type_hints(options, include_extras=True)

    def command(**values: object) -> None:
        act(options(**values))

    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(options)  # pyright: ignore[reportArgumentType] - a dataclass, which no bound can say
    ]
    command.__signature__ = inspect.Signature(parameters)  # what typer looks at
    return command


def audit(options: AuditOptions) -> None:
    """Exit status 0 for a pass, 1 for a failure or an incomplete audit."""
    from orchestrator.audit.run import audit_file

    raise typer.Exit(audit_file(options))
