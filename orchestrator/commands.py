"""What the commands that start something do, step by step."""

import shutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import typer

from actors.preflight import check_packages
from orchestrator.config import RunConfig
from orchestrator.launch import check_inputs, execute
from orchestrator.progress import reporter_for_stdout
from orchestrator.run_dir import create_run_dir, open_run_dir, write_atomic
from orchestrator.show import show_summary
from rollout.errors import UserError
from trainer.config import LocalModelConfig, ModelConfig, TinyModelConfig


def run_new(config: RunConfig, default_name: str) -> None:
    """`concord run`."""
    check_packages()
    reporter = reporter_for_stdout()
    reporter.say("preparing the model")
    inputs = check_inputs(config, prepare_model(config.model))
    run = create_run_dir(config, default_name)
    try:
        summary = execute(config, run, inputs, reporter)
    finally:
        reporter.close()
    show_summary(run, summary)


def run_again(path: Path, overrides: list[str]) -> None:
    """`concord resume`."""
    check_packages()
    run, config = open_run_dir(path, overrides)
    if overrides:
        write_atomic(run.config, config.model_dump_json(indent=2) + "\n")
    reporter = reporter_for_stdout()
    inputs = check_inputs(config, prepare_model(config.model))
    try:
        summary = execute(config, run, inputs, reporter)
    finally:
        reporter.close()
    show_summary(run, summary)


def make_tiny(out: Path, moe: bool, seed: int) -> None:
    """`concord tiny`."""
    if out.exists():
        raise UserError(f"{out} exists; give a folder that does not")
    built = prepare_model(TinyModelConfig(moe=moe, seed=seed))
    shutil.copytree(built, out)
    typer.echo(f"model in {out}")


def prepare_model(config: ModelConfig) -> Path:
    """The directory of the model; a tiny one comes from its cache or is built, in a process of its own, which keeps torch out of this one."""
    if isinstance(config, LocalModelConfig):
        return config.path.absolute()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_build, config).result()


def _build(config: TinyModelConfig) -> Path:
    from trainer.tiny import build_tiny, default_cache_dir

    return build_tiny(config, default_cache_dir())
