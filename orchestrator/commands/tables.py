"""Tables and lines for people: how each is printed; the plan of a run before it starts, its summary afterwards."""

import json
from collections.abc import Collection, Mapping
from typing import cast

from rich.console import Console
from rich.table import Table

from orchestrator.config import RunConfig
from orchestrator.launch.plan import resource_plan, totals
from orchestrator.run_dir.layout import RunDir


def say(text: str) -> None:
    """Print a line of plain text: what looks like markup in it is text, too."""
    Console().print(text, markup=False, highlight=False)


def table_of(*heads: str, title: str | None = None, right: Collection[str] = ()) -> Table:
    """A table with these columns, of which those in `right` hold numbers."""
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="right" if head in right else "left")
    return table


def show_plan(config: RunConfig) -> None:
    """Print the resolved config as JSON, and the resource plan."""
    console = Console()
    console.print_json(config.model_dump_json())
    plan = resource_plan(config)
    table = table_of("role", "count", "CPUs each", "GPUs each", "what", title="resource plan")
    for share in plan:
        table.add_row(share.role, str(share.count), f"{share.cpus:g}", f"{share.gpus:g}", share.note)
    console.print(table)
    cpus, gpus = totals(plan)
    console.print(f"in all {cpus:g} CPUs and {gpus:g} GPUs; nothing was started")


def show_summary(run: RunDir, summary: Mapping[str, object]) -> None:
    """Print the summary: a table on a terminal, one JSON line otherwise."""
    console = Console()
    if not console.is_terminal:
        console.file.write(json.dumps({"summary": summary}) + "\n")
        return
    table = Table(title=str(run.path), show_header=False)
    for key, value in summary.items():
        table.add_row(key, _cell(value))
    console.print(table)


def _cell(value: object) -> str:
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, object]", value)
        return ", ".join(f"{k} {_cell(v)}" for k, v in entries.items()) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
