"""What `concord audit` may be asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What the user asks for."""

    file: Annotated[Path, typer.Argument(metavar="FILE", help="Dump with one sequence a row: .jsonl or .parquet.")]
    model: Annotated[
        Path, typer.Option(metavar="DIR", help="Hugging Face directory of the model that sampled it (version 0).")
    ]
    weights: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="`weights` folder of a run: each token is scored at its own version."),
    ] = None
    layout: Annotated[
        Literal["tokens", "completion", "next_token"],
        typer.Option(help="Which tokens the entries of a row's columns belong to."),
    ] = "tokens"
    columns: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=NAME", help="Name of a column, such as logprobs=rollout_logprobs; may be repeated."),
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="Temperature of all rows; without it each row's own column, else 1.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help="Top-p of all rows; without it each row's own column, else 1 (off).")
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Top-k of all rows; without it each row's own column, else 0 (off).")
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="What the scores are computed in: your trainer's dtype.")
    ] = "float32"
    engine_dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "fp8"] | None,
        typer.Option(help="What the engine computed in; decides the limits. Default: --dtype."),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="ROWS", help="Look at the first rows only; the report says so.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False
