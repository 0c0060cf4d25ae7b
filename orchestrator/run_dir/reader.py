"""One run directory, read again and again: metric parts, block parts and events, each only once. Never writes, never
opens the store for writing.

What is missing is noted, never guessed: a run that still goes on has rows in memory that no part holds yet.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from orchestrator.config import DeadlinesConfig
from orchestrator.run_dir.ending import gone, read_end
from orchestrator.run_dir.events import EventLog
from orchestrator.run_dir.histograms import Histograms, read_histograms
from orchestrator.run_dir.history import How, RunEnd
from orchestrator.run_dir.layout import RunDir
from orchestrator.run_dir.lineage import Lineage
from orchestrator.run_dir.record import Record, measured, tallies_by_kind
from orchestrator.run_dir.rows import BlockRows, StepRows
from rollout.errors import StoreError, StoreVersionError, UserError, boundary
from rollout.store.sqlite.schema import open_for_reading

PARTS = "a part is written every 50 steps, at every checkpoint, and when the loop ends"


class RunReader:
    """`read` answers with what there is by now."""

    def __init__(self, path: Path) -> None:
        """Check that it is a run that this version can read.

        Raises:
            UserError: no run, or one of a newer format.
        """
        self.run = RunDir(path.absolute())
        self._wanted, self._stall_s = _config_of(self.run)
        self._version = 0
        self._store = _store_trouble(self.run)
        self._events = EventLog(self.run.events)
        self._rows, self._blocks = StepRows(self.run.metrics), BlockRows(self.run.block_metrics)
        self._lineage = Lineage({})

    def read(self) -> tuple[Record, tuple[str, ...]]:
        """The record, and what it lacks, in words."""
        end, unreadable = self._end()  # asked first: what a run writes before its summary is then read below
        for source in (self._events, self._rows, self._blocks):
            source.read()
        if end is None and not unreadable and (how := gone(self.run, self._events.at_s, self._stall_s)):
            end = RunEnd(how=How.LOST, reason=how)
        ending = unreadable or self._ending(end)
        lineage = self._lineage = self._rows.lineage(self._events.resumed)
        columns = self._rows.all(lineage)
        steps = columns.get("step", np.empty(0)).astype(np.int64)
        record = Record(
            steps=steps,
            columns=measured(columns),
            blocks=self._blocks.all(steps, lineage),
            tallies=tallies_by_kind([self._events.tally_at(step) for step in steps.tolist()]),
            events=tuple(self._events.all(lineage)),
            history=replace(self._events.history(), end=end),
        )
        files = (*self._events.notes(), *self._rows.notes(), *self._blocks.notes())
        return record, (*ending, *self._behind(record), *files, *self._store)

    def histograms(self) -> Histograms:
        """What was counted by bucket in the steps of the record that was read last."""
        return read_histograms(self.run.histograms, self._lineage)

    def _behind(self, record: Record) -> list[str]:
        version = self._events.version
        if version > record.last_step:
            first = record.last_step + 1
            steps = f"step {version} is" if version == first else f"steps {first} to {version} are"
            return [f"{steps} in no metric part yet ({PARTS})"]
        return [] if record.steps.size else [f"there is no metric part yet: no series is seen ({PARTS})"]

    def _end(self) -> tuple[RunEnd | None, list[str]]:
        """How the run ended, and why that is not known where a summary says it."""
        try:
            end, self._version = read_end(self.run, self._wanted)
        except (OSError, ValueError):
            return None, ["summary.json cannot be read: how the run ended is not known"]
        return end, []

    def _ending(self, end: RunEnd | None) -> list[str]:
        """How the run stands, where it has not finished."""
        if end is None:
            return [f"there is no summary.json: the run still goes on, or an error ended it{self._events.newest()}"]
        if end.how is How.FINISHED:
            return []
        if end.how is How.STOPPED:
            return [f"the run was stopped after step {self._version} of {self._wanted}"]
        return [f"the run ended early ({end.how}): {end.reason}{self._events.newest() if end.how is How.LOST else ''}"]


def _config_of(run: RunDir) -> tuple[int | None, float]:
    """`run.steps` and `deadlines.stall_s` of the config; None and the default where another version wrote it
    otherwise."""
    if not run.config.is_file():
        raise UserError(
            f"{run.path} is not a run directory: {run.config} is missing; give the folder that `concord run` printed"
        )
    with boundary(UserError, f"{run.config} is no JSON; restore it"):
        config: object = json.loads(run.config.read_bytes())
    if not isinstance(config, dict):
        raise UserError(f"{run.config} holds {type(config).__name__}, expected the sections of a config; restore it")
    sections = cast("dict[str, Any]", config)
    steps, stall_s = _key(sections, "run", "steps"), _key(sections, "deadlines", "stall_s")
    return steps if isinstance(steps, int) else None, (
        float(stall_s) if isinstance(stall_s, int | float) else DeadlinesConfig().stall_s
    )


def _key(config: dict[str, Any], section: str, key: str) -> object:
    found: object = config.get(section)
    return cast("dict[str, Any]", found).get(key) if isinstance(found, dict) else None


def _store_trouble(run: RunDir) -> tuple[str, ...]:
    """Why the store cannot be opened, where it cannot: rows and events are read all the same."""
    if not run.store.exists():
        return ()
    try:
        open_for_reading(run.store).close()
    except StoreVersionError as error:
        raise UserError(str(error)) from error
    except StoreError as error:
        return (f"the store cannot be read: {error}",)
    return ()
