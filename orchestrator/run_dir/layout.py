"""The run directory: its layout, its creation, and what is kept in it. Everything but the logs is complete or
absent."""

import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from orchestrator.config import RunConfig, parse_config
from rollout.errors import UserError
from rollout.store.sqlite.journal import FILE_NAME as EVENTS_FILE
from rollout.store.sqlite.schema import FILE_NAME as STORE_FILE
from rollout.types.weights import PolicyVersion


class _Below:
    """A path below a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDir", owner: object = None) -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths below `runs/NAME`."""

    path: Path

    config = _Below("config.json")
    """The resolved config."""
    summary = _Below("summary.json")
    """The machine-readable result."""
    driver = _Below("driver.json")
    """The process that drives it, or drove it last."""
    weights = _Below("weights")
    """One directory a published version."""
    checkpoints = _Below("checkpoints")
    """One directory a checkpoint."""
    saved_steps = _Below("saved_steps")
    """One directory a step that was not applied, as many as are kept."""
    metrics = _Below("metrics")
    """Parquet parts, one row a step."""
    block_metrics = _Below("block_metrics")
    """Parquet parts, one row a step, block and signal."""
    gradloc = _Below("gradloc")
    """One file a step whose gradient was searched."""
    histograms = _Below("histograms")
    """Parquet parts: values by bucket of some steps."""
    tensorboard = _Below("tensorboard")
    """Event files of TensorBoard."""
    wandb = _Below("wandb")
    """Where Weights & Biases keeps what it has of this run."""
    store = _Below(STORE_FILE)
    """The trajectory store's database."""
    events = _Below(EVENTS_FILE)
    """The numbered events of the store, one JSON object a line."""
    report = _Below("report.html")
    """The run's page for people."""
    stacks = _Below("stacks")
    """Stack dumps of actors."""
    export = _Below("export")
    """The trained model in Hugging Face layout, once the run has finished."""

    @property
    def prometheus_targets(self) -> Path:
        """Where Prometheus finds this run. It lies beside those of the other runs of its folder, since Prometheus takes
        a `*` in the last part of a path only: `RUNS/.prometheus/*.json` finds them all."""
        return self.path.parent / ".prometheus" / f"{self.path.name}.json"

    def weights_of(self, policy: PolicyVersion) -> Path:
        return self.weights / policy.key

    def checkpoint_of(self, policy: PolicyVersion) -> Path:
        return self.checkpoints / policy.key


def write_atomic(path: Path, text: str) -> None:
    """Write a file that is either complete or absent (temporary name, fsync, rename)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def refuse_taken_name(config: RunConfig) -> None:
    """Say that the run's name is taken before any work is done for it; the run directory's creation says it again, for
    two that start together.

    Raises:
        UserError: the name exists.
    """
    path = (config.run.dir / config.run.name).absolute() if config.run.name else None
    if path is not None and path.exists():
        raise _taken(path)


def _taken(path: Path) -> UserError:
    return UserError(
        f"run {path.name!r} exists at {path}; continue it with `concord resume {path}`, or choose another --name"
    )


def create_run_dir(config: RunConfig, default_name: str) -> RunDir:
    """Make the directory of a new run and write its config.

    Raises:
        UserError: the name exists, or the directory cannot be written.
    """
    name = config.run.name or f"{default_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = (config.run.dir / name).absolute()
    try:
        if path.parent.exists() and not path.parent.is_dir():
            raise UserError(f"run.dir is {config.run.dir}, which is a file; set it to a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
        run = RunDir(path)
        write_atomic(run.config, config.model_dump_json(indent=2) + "\n")
    except FileExistsError as cause:
        raise _taken(path) from cause
    except OSError as cause:
        raise UserError(
            f"cannot write the run directory {path}: {cause.strerror}; set run.dir to a writable folder with free space"
        ) from cause
    return run


RETIRED_KEYS = (("trainer", "gradloc", "subtract"),)
"""Keys that chose how something is done, not what comes out; the config of an older run directory may hold them."""


def _without_retired(document: Any) -> Any:  # noqa: ANN401 - whatever the file holds
    """A stored config without the keys that no longer choose anything."""
    for *sections, key in RETIRED_KEYS:
        section: Any = document
        for name in sections:
            section = cast(dict[str, Any], section).get(name) if isinstance(section, dict) else None
        if isinstance(section, dict):
            cast(dict[str, Any], section).pop(key, None)
    return document


def open_run_dir(path: Path, overrides: Sequence[str] = ()) -> tuple[RunDir, RunConfig]:
    """The directory of an existing run, and its config after `overrides`.

    Raises:
        UserError: there is no run, another version of Concord wrote it, or an override does not fit.
    """
    run = RunDir(path.absolute())
    try:
        document = json.loads(run.config.read_text())
    except (OSError, ValueError) as cause:
        raise UserError(
            f"{path} is not a run directory: {run.config} is missing or unreadable; give the folder that `concord run` "
            "printed"
        ) from cause
    try:
        config = parse_config(_without_retired(document), str(run.config))
    except UserError as cause:
        raise UserError(
            f"another version of Concord wrote {path}, or its config was edited; open it with the version that wrote "
            f"it\n{cause}"
        ) from cause
    return run, parse_config(document, str(run.config), overrides) if overrides else config


def prune_weights(run: RunDir, keep: Iterable[PolicyVersion]) -> None:
    """Remove published versions but those in `keep` and version 0."""
    kept = {policy.key for policy in keep}
    for directory in run.weights.glob("e*-v*"):
        if directory.name not in kept and PolicyVersion.parse(directory.name).version != 0:
            shutil.rmtree(directory)
