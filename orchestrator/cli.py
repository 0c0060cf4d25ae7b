"""The command `concord`. Heavy libraries are imported by the commands that need them, so that `--help` answers at once."""

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Asynchronous reinforcement learning for language models.")

SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one key of the config; may be repeated.")]


def main() -> None:
    """Entry point of the console script: user errors are printed without a traceback, with exit status 2; other errors of a run with 1."""
    from rollout.errors import ConcordError, UserError

    try:
        app()
    except UserError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(2)
    except ConcordError as error:
        typer.secho(f"run failed: {error}", fg="red", err=True)
        sys.exit(1)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="TOML file, such as examples/quickstart.toml.")],
    set_: SetOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the run's folder.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved config and the resource plan; start nothing.")] = False,
) -> None:
    """Start a run."""
    from orchestrator.config import load_config

    overrides = [*(set_ or []), *([f'run.name="{name}"'] if name else [])]
    resolved = load_config(config, overrides)
    if dry_run:
        from orchestrator.show import show_plan

        show_plan(resolved)
        return
    from orchestrator.commands import run_new

    run_new(resolved, config.stem)


@app.command()
def resume(run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")], set_: SetOption = None) -> None:
    """Continue a run from its last checkpoint."""
    from orchestrator.commands import run_again

    run_again(run_dir, set_ or [])


@app.command()
def tiny(
    out: Annotated[Path, typer.Argument(help="Folder to write the model to.")],
    moe: Annotated[bool, typer.Option("--moe", help="Mixture of experts instead of a dense model.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
) -> None:
    """Build the tiny warm-started model in Hugging Face layout."""
    from orchestrator.commands import make_tiny

    make_tiny(out, moe, seed)


@app.command()
def explain(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")],
    trajectory: Annotated[str, typer.Argument(help="Id of a trajectory, such as d00000012-3, or of its dispatch.")],
) -> None:
    """Show a trajectory: tokens with versions and log-probs, reward, outcome."""
    from orchestrator.explain import explain_trajectory

    explain_trajectory(run_dir, trajectory)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(installed("concord-rl"))
