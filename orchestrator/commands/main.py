"""The command `concord`. Heavy libraries are imported by the commands that need them, so that `--help` answers at
once."""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.audit.options import AuditOptions
from orchestrator.commands.audit import audit, command_of
from orchestrator.commands.dashboards import app as dashboards

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Asynchronous reinforcement learning for language models.",
)

SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one key of the config; may be repeated.")
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.")]


def main() -> None:
    """Entry point of the console script. Exit status 2 and one message for what the user can mend, 1 for what ended a
    run, 130 for a stop by signal."""
    if intrusion := _intrusion():
        _fail(f"error: {intrusion}", 2)
    from orchestrator.launch.stop_signals import Stopped
    from rollout.errors import ConcordError, UserError

    try:
        app()
    except UserError as error:
        _fail(f"error: {error}", 2)
    except Stopped as error:
        _fail(str(error), 130)
    except ConcordError as error:
        _fail(f"run failed: {error}", 1)


def _intrusion() -> str:
    """What the preflight of this very checkout has to complain of; it is read from its file, since the intruder may be
    another `actors`."""
    file = Path(__file__).resolve().parents[2] / "actors" / "preflight.py"
    spec = importlib.util.spec_from_file_location("concord_preflight", file)
    if spec is None or spec.loader is None:
        return f"{file} is missing; install Concord again (`make setup`)"
    preflight = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(preflight)
    return preflight.complaint()


def _fail(message: str, status: int) -> None:
    typer.secho(message, fg="red", err=True)
    sys.exit(status)


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="TOML file, such as examples/quickstart.toml.")],
    set_: SetOption = None,
    name: Annotated[str | None, typer.Option(help="Name of the run's folder.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved config and the resource plan; start nothing.")
    ] = False,
) -> None:
    """Start a run."""
    from orchestrator.config import load_config

    overrides = [*(set_ or []), *([f'run.name="{name}"'] if name else [])]
    resolved = load_config(config, overrides)
    if dry_run:
        from orchestrator.commands.tables import show_plan

        show_plan(resolved)
        return
    from orchestrator.commands.run import run_new

    run_new(resolved, config.stem)


@app.command()
def resume(run_dir: RunArgument, set_: SetOption = None) -> None:
    """Continue a run from its last checkpoint."""
    from orchestrator.commands.run import run_again

    run_again(run_dir, set_ or [])


@app.command()
def tiny(
    out: Annotated[Path, typer.Argument(help="Folder to write the model to.")],
    moe: Annotated[bool, typer.Option("--moe", help="Mixture of experts instead of a dense model.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
) -> None:
    """Build the tiny warm-started model in Hugging Face layout."""
    from orchestrator.commands.run import make_tiny

    make_tiny(out, moe, seed)


@app.command()
def explain(
    run_dir: RunArgument,
    trajectory: Annotated[str, typer.Argument(help="Id of a trajectory, such as d00000012-3, or of its dispatch.")],
) -> None:
    """Show a trajectory: tokens with versions and log-probs, reward, outcome."""
    from orchestrator.commands.explain import explain_trajectory

    explain_trajectory(run_dir, trajectory)


@app.command()
def gradloc(
    run_dir: RunArgument,
    step: Annotated[
        str | None, typer.Argument(help="A searched step, such as 12 or e1-v12; without it, all searches.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of tables.")] = False,
) -> None:
    """Show gradient searches: which token made a step's gradient explode, in its text, with its ratios and its share of
    each block."""
    from orchestrator.commands.gradloc import show_searches

    show_searches(run_dir, step, as_json=as_json)


@app.command()
def doctor(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, finished or not.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line a diagnosis instead of tables.")] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Look again every few seconds until the run has ended in order; print what changed."
        ),
    ] = False,
) -> None:
    """Say what is wrong with a run, in causal order, with evidence, what to do and what not to do."""
    from orchestrator.commands.doctor import examine

    examine(run_dir, json_lines=as_json, watch=watch)


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, also while it runs.")],
) -> None:
    """Write RUN/report.html, one file that loads nothing from outside."""
    from orchestrator.report.make import make_report

    made = make_report(run_dir)
    for note in made.notes:
        typer.secho(note, fg="yellow", err=True)
    typer.echo(made.path)


@app.command()
def replay(
    run_dir: RunArgument,
    step: Annotated[
        str, typer.Argument(help="Folder in saved_steps, such as 12: the version that the step was to produce.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")] = False,
) -> None:
    """Run the batch of a saved step again: does it reproduce, in which block, by which token?"""
    from orchestrator.commands.replay import replay_step

    replay_step(run_dir, step, as_json=as_json)


app.add_typer(dashboards, name="dashboards")
app.command(name="audit", help="Check a dump of log-probs from any framework against the model that sampled it.")(
    command_of(AuditOptions, audit)
)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    typer.echo(installed("concord-rl"))
