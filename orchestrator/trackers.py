"""Sends the rows of a run to TensorBoard or Weights & Biases, named and grouped by the catalogue. Trouble there never ends a run."""

from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any, Literal, Protocol

from orchestrator.config import RunConfig
from orchestrator.layers import LAYERS
from orchestrator.metrics import ROW_METRICS
from orchestrator.progress import Reporter
from orchestrator.run_dir import RunDir
from rollout.errors import ConcordError, UserError, boundary

FINISH_S = 60.0
"""For what Weights & Biases has not sent when a run ends; the rest stays in its folder for `wandb sync`."""
CURE = "install it with: pip install 'concord-rl[trackers]'"
TAGS: Mapping[str, str] = {m.column: f"{m.diagnosis_layer} {LAYERS[m.diagnosis_layer].name}/{m.column}" for m in ROW_METRICS}
"""Column -> name in a tracker, where what stands before the slash is a group."""


SCORES = ("eval_score", "eval_stderr")
"""Columns that compare within one configuration of the evaluation only."""


class Tracker(Protocol):
    """Where rows go."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """What was measured in a step, by tag."""
        ...

    def close(self) -> None:
        """Write what is buffered."""
        ...


class TensorBoardTracker:
    """Event files in `RUN/tensorboard`; `tensorboard --logdir runs` shows all runs."""

    def __init__(self, directory: Path) -> None:
        from tensorboard import summary

        writer: Any = summary
        self._writer = writer.Writer(str(directory))
        self._help = {TAGS[metric.column]: f"{metric.help} Unit: {metric.unit}." for metric in ROW_METRICS}

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """One point a curve; the first comes with its meaning, which TensorBoard keeps from there."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step, description=self._help.pop(tag, None))

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class WandbTracker:
    """A run of Weights & Biases in `RUN/wandb`; offline it is uploaded later with `wandb sync`. A resume goes on with the same run."""

    def __init__(self, run: RunDir, config: RunConfig, mode: Literal["offline", "online"]) -> None:
        import wandb

        library: Any = wandb
        before = sorted((run.path / "wandb").glob("*run-*-*"))
        self._run = library.init(
            project=config.trackers.wandb_project,
            name=run.path.name,
            id=before[-1].name.rpartition("-")[2] if before else None,
            resume="allow",
            dir=str(run.path),
            mode=mode,
            config=config.model_dump(mode="json"),
            settings=library.Settings(console="off", silent=True, finish_timeout=FINISH_S, finish_timeout_raises=True),
        )
        self._run.define_metric("*", step_metric=TAGS["step"])

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """One row. Curves run over the column `step`, since a resume may go back."""
        self._run.log(dict(values))

    def close(self) -> None:
        """Write, and online also send, what is buffered."""
        self._run.finish()


class Tracked:
    """A reporter that also feeds trackers. One that fails is told once and dropped."""

    def __init__(self, reporter: Reporter, trackers: Sequence[tuple[str, Tracker]]) -> None:
        self._reporter = reporter
        self._trackers = dict(trackers)

    def say(self, text: str) -> None:
        """For people only."""
        self._reporter.say(text)

    def step(self, row: Mapping[str, float], steps: int) -> None:
        """A step finished: to people, and to every tracker what was measured in it."""
        self._reporter.step(row, steps)
        values = measured(row)
        for name, tracker in list(self._trackers.items()):
            try:
                with boundary(ConcordError, name):
                    tracker.step(int(row["step"]), values)
            except ConcordError as error:
                del self._trackers[name]
                self._reporter.say(f"{error}; nothing more goes to {name}, the training goes on")

    def close(self) -> None:
        """Close the trackers, then the reporter."""
        for name, tracker in self._trackers.items():
            try:
                with boundary(ConcordError, name):
                    tracker.close()
            except ConcordError as error:
                self._reporter.say(f"{error}; the last rows may be missing in {name}")
        self._reporter.close()


def measured(row: Mapping[str, float]) -> dict[str, float]:
    """The values of a row by tag, without what says that nothing was measured."""
    there = [m for m in ROW_METRICS if m.column in row and (m.unmeasured is None or row[m.column] != m.unmeasured)]
    return {_tag(m.column, int(row.get("eval_fingerprint_changed", 0))): row[m.column] for m in there}


def _tag(column: str, configuration: int) -> str:
    """Scores of another configuration of the evaluation are another curve."""
    return f"{TAGS[column]}_configuration_{configuration}" if configuration and column in SCORES else TAGS[column]


def refuse_missing(config: RunConfig) -> None:
    """Say that a tracker is not installed before any work is done.

    Raises:
        UserError: one that the config asks for is missing.
    """
    asked = {"tensorboard": config.trackers.tensorboard, "wandb": config.trackers.wandb != "off"}
    missing = [name for name, wanted in asked.items() if wanted and util.find_spec(name) is None]
    if missing:
        raise UserError(f"trackers.{missing[0]} is on, but the package {missing[0]} is not installed; {CURE}, or turn it off")


def tracked(config: RunConfig, run: RunDir, reporter: Reporter) -> Reporter:
    """`reporter`, with the trackers that the config asks for.

    Raises:
        UserError: one is not installed, or does not start.
    """
    chosen = config.trackers
    opened: list[tuple[str, Tracker]] = []
    if chosen.tensorboard:
        with boundary(UserError, "trackers.tensorboard is on, but TensorBoard does not start"):
            opened.append(("TensorBoard", TensorBoardTracker(run.path / "tensorboard")))
    if chosen.wandb != "off":
        with boundary(UserError, f'trackers.wandb is "{chosen.wandb}", but Weights & Biases does not start (without a network set "offline")'):
            opened.append(("Weights & Biases", WandbTracker(run, config, chosen.wandb)))
    return Tracked(reporter, opened) if opened else reporter
