"""What the commands that start something do, step by step."""

import contextlib
import shutil
import signal
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import psutil
import typer

from orchestrator.commands.tables import show_summary
from orchestrator.config import RunConfig
from orchestrator.exporters.prometheus import Exporter
from orchestrator.exporters.trackers import open_trackers, refuse_missing
from orchestrator.launch.console import Reporter, reporter_for_stdout
from orchestrator.launch.inputs import Inputs, check_inputs
from orchestrator.launch.launch import execute
from orchestrator.launch.stop_signals import Stopped, interruptible
from orchestrator.run_dir.layout import RunDir, create_run_dir, open_run_dir, refuse_taken_name, write_atomic
from orchestrator.signals.observer import Sinks
from rollout.errors import ConcordError, UserError, boundary
from rollout.rewards.registry import build_reward
from trainer.config.trainer import LocalModelConfig, ModelConfig, TinyModelConfig


@interruptible()
def run_new(config: RunConfig, default_name: str) -> None:
    """`concord run`."""
    refuse_taken_name(config)
    refuse_missing(config)
    build_reward(config.reward)  # a function that cannot be imported is reported before a model is built for it
    reporter = reporter_for_stdout()
    with _exporter(config) as exporter:
        reporter.say("preparing the model")
        inputs = check_inputs(config, prepare_model(config.model))
        _carry_out(config, create_run_dir(config, default_name), inputs, reporter, exporter)


@interruptible()
def run_again(path: Path, overrides: list[str]) -> None:
    """`concord resume`."""
    run, config = open_run_dir(path, overrides)
    refuse_missing(config)
    with _exporter(config) as exporter:
        inputs = check_inputs(config, prepare_model(config.model))
        if overrides:  # only now: what was refused is not kept
            with boundary(UserError, f"cannot write {run.config} (free space, or make the run directory writable)"):
                write_atomic(run.config, config.model_dump_json(indent=2) + "\n")
        _carry_out(config, run, inputs, reporter_for_stdout(), exporter)


def _exporter(config: RunConfig) -> contextlib.AbstractContextManager[Exporter | None]:
    """Listens before anything else starts: a port that is taken is reported at once."""
    return Exporter(config.exporter.host, config.exporter.port) if config.exporter.enabled else contextlib.nullcontext()


@contextlib.contextmanager
def last_state_scraped(exporter: Exporter | None) -> Generator[None]:
    """Where an error ends what is inside, whoever scrapes gets the state in which it ended; where somebody stopped it,
    nobody waits for that."""
    try:
        yield
    except ConcordError as error:
        if exporter is not None and not isinstance(error, Stopped):
            exporter.let_last_state_be_scraped()
        raise


def _carry_out(config: RunConfig, run: RunDir, inputs: Inputs, reporter: Reporter, exporter: Exporter | None) -> None:
    """Execute the run, and say at the end what it came to and how to go on with it."""
    go_on = f"go on from the last checkpoint with: concord resume {run.path}"
    try:
        with (
            contextlib.closing(reporter),
            last_state_scraped(exporter),
            open_trackers(config, run, reporter.say) as trackers,
        ):
            summary = execute(config, run, inputs, reporter, Sinks(exporter=exporter, trackers=trackers))
    except (ConcordError, KeyboardInterrupt) as error:
        if not isinstance(error, Stopped | KeyboardInterrupt):
            _report(run, reporter)
        reporter.say(f"ended before step {config.run.steps}; {go_on}")
        raise
    _report(run, reporter)
    # An end in order is no endpoint that does not answer, and its port may soon be another's.
    run.prometheus_targets.unlink(missing_ok=True)
    show_summary(run, summary)
    if summary["version"] != config.run.steps:
        reporter.say(f"stopped at step {summary['version']} of {config.run.steps}, which has a checkpoint; {go_on}")


def _report(run: RunDir, reporter: Reporter) -> None:
    """Make the page for people; a run does not fail for want of it."""
    from orchestrator.report.make import make_report

    try:
        with boundary(ConcordError, "drawing"):
            reporter.say(f"report: {make_report(run.path).path}")
    except ConcordError as error:
        reporter.say(f"there is no report: {error}; make it later with: concord report {run.path}")


@interruptible()
def make_tiny(out: Path, moe: bool, seed: int) -> None:
    """`concord tiny`."""
    if out.exists():
        raise UserError(f"{out} exists; give a folder that does not")
    built = prepare_model(TinyModelConfig(moe=moe, seed=seed))
    shutil.copytree(built, out)
    typer.echo(f"model in {out}")


def prepare_model(config: ModelConfig) -> Path:
    """The directory of the model; a tiny one comes from its cache or is built, in a process of its own, which keeps
    torch out of this one."""
    if isinstance(config, LocalModelConfig):
        return config.path.absolute()
    from trainer.tiny.tiny import build_tiny, cached_tiny, default_cache_dir

    found = cached_tiny(config, default_cache_dir())
    if found is not None:
        return found
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            # The child keeps this mask: on Ctrl-C, which a terminal sends to both, only this process speaks, and ends
            # the other.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            built = pool.submit(build_tiny, config, default_cache_dir(), partial(typer.echo, err=True))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            return built.result()
        except KeyboardInterrupt:
            for child in psutil.Process().children():
                child.terminate()
            raise
