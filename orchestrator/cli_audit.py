"""The options of `concord audit`, one field each, and how such a class becomes a command. Imports nothing heavy."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_type_hints

import typer

_Options = TypeVar("_Options")


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What the user asks for."""

    file: Annotated[Path, typer.Argument(metavar="FILE", help="Dump with one sequence a row: .jsonl or .parquet.")]
    model: Annotated[Path, typer.Option(metavar="DIR", help="Hugging Face directory of the model that sampled it (version 0).")]
    weights: Annotated[Path | None, typer.Option(metavar="DIR", help="`weights` folder of a run: each token is scored at its own version.")] = None
    layout: Annotated[Literal["tokens", "completion", "next_token"], typer.Option(help="Which tokens the entries of a row's columns belong to.")] = "tokens"
    columns: Annotated[list[str] | None, typer.Option(metavar="KEY=NAME", help="Name of a column, such as logprobs=rollout_logprobs; may be repeated.")] = None
    temperature: Annotated[float | None, typer.Option(help="Of all rows; without it each row's own column, else 1.")] = None
    top_p: Annotated[float | None, typer.Option(help="Of all rows; without it each row's own column, else 1 (off).")] = None
    top_k: Annotated[int | None, typer.Option(help="Of all rows; without it each row's own column, else 0 (off).")] = None
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="What the scores are computed in: your trainer's dtype.")] = "float32"
    engine_dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "fp8"] | None, typer.Option(help="What the engine computed in; decides the limits. Default: --dtype.")
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, metavar="ROWS", help="Look at the first rows only; the report says so.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False


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
    from orchestrator.audit import audit_file

    raise typer.Exit(audit_file(options))
