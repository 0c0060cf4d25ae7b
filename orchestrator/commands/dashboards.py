"""The commands `concord dashboards ...`. Imports nothing heavy."""

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Dashboards for Grafana.")


@app.callback()
def dashboards() -> None:
    """Dashboards for Grafana."""


@app.command()
def push(
    url: Annotated[str, typer.Option(metavar="URL", help="Grafana's address, such as http://127.0.0.1:3000.")],
    token: Annotated[str, typer.Option(help="Token of a service account with the role Admin.")],
    prometheus: Annotated[
        str, typer.Option(metavar="URL", help="Prometheus' address as Grafana reaches it.")
    ] = "http://127.0.0.1:9090",
) -> None:
    """Make folder, data source and dashboards, or bring them up to date; print what changed."""
    from orchestrator.commands.dashboards_push import Became, Grafana, push

    counts = dict.fromkeys(Became, 0)
    for change in push(Grafana(url, token), prometheus):
        counts[change.became] += 1
        typer.echo(f"{change.became}: {change.what}")
    typer.echo(", ".join(f"{count} {became}" for became, count in counts.items()))
