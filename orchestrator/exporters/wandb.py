"""Sends the steps of a run to Weights & Biases, at once or by a later `wandb sync`. Needs the package `wandb`."""

import json
from typing import Any, Literal

import wandb

from orchestrator.config import RunConfig
from orchestrator.exporters.tracker_tags import Points, tag_of
from orchestrator.run_dir.layout import RunDir, write_atomic

library: Any = wandb
FINISH_S = 60.0
"""For what has not been sent when a run ends; the rest stays in its folder for `wandb sync`."""
SENT = "concord_sent.json"
"""The last step of each series that was sent."""
STEP = tag_of("concord_step")


class WandbTracker:
    """A run of Weights & Biases in `RUN/wandb`; offline it is uploaded later with `wandb sync`. A resume goes on with
    the same run."""

    def __init__(self, run: RunDir, config: RunConfig, mode: Literal["offline", "online"]) -> None:
        before = sorted(run.wandb.glob("*run-*-*"))
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
        self._run.define_metric("*", step_metric=STEP)
        self._sent_file = run.wandb / SENT
        self._sent: dict[str, int] = json.loads(self._sent_file.read_text()) if self._sent_file.exists() else {}

    def take(self, points: Points) -> None:
        """One row, with its step as a column over which all curves run. Steps that a resume repeats are left out: what
        was sent cannot be taken back."""
        if points.step <= self._sent.get(points.series, -1):
            return
        histogram = library.Histogram
        bars = {tag: histogram(np_histogram=(list(b.counts), list(b.edges))) for tag, b in points.bars.items()}
        self._run.log({**points.numbers, **bars, STEP: float(points.step)})
        self._sent[points.series] = points.step
        write_atomic(self._sent_file, json.dumps(self._sent))

    def close(self) -> None:
        self._run.finish()
