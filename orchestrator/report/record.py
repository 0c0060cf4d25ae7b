"""Reads a run directory into the plain data of a report. What cannot be read is noted in words, and the rest is shown."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from orchestrator.config import RunConfig
from orchestrator.histogram_parts import Histograms, read_histograms
from orchestrator.metric_parts import MetricRows, read_rows
from orchestrator.run_dir import RunDir, open_run_dir
from rollout.dispatch import Counts
from rollout.errors import StoreError
from rollout.store.journal import EventKind
from rollout.store.reader import open_reader
from rollout.weights import PolicyVersion

OF_ONE_DISPATCH = frozenset(
    str(kind)
    for kind in EventKind
    if kind
    not in (EventKind.EPOCH_OPENED, EventKind.STEP_COMMITTED, EventKind.STEP_TAKEN_BACK, EventKind.VERSION_COMMITTED, EventKind.VERSION_ORPHANED)
)
"""Events that are counted by the store and never drawn one by one."""
_KIND = re.compile(r'"kind":\s*"([^"]*)"')
Fields = Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event that is not of a single dispatch."""

    at_s: float
    """Unix time."""
    kind: str
    step: float
    """Where it lies between the steps: 12.5 is half-way between the ends of steps 12 and 13."""
    fields: Fields
    """What the kind adds; lists and objects are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All that a report shows."""

    path: Path
    config: RunConfig
    rows: MetricRows
    events: tuple[RunEvent, ...]
    """In the order of their numbers, each once."""
    histograms: Histograms
    counts: Counts | None
    """None where the store cannot be read."""
    summary: Mapping[str, object] | None
    """None while the run goes on, and after an error ended it."""
    notes: tuple[str, ...]
    """What the report lacks, and why."""

    def events_of(self, *kinds: str) -> list[RunEvent]:
        """Those of the kinds, in order."""
        return [event for event in self.events if event.kind in kinds]


def read_record(path: Path) -> RunRecord:
    """Everything that can be read of the run in `path`, also while it runs.

    Raises:
        UserError: it is no run directory, or another version of Concord wrote it.
    """
    run, config = open_run_dir(path)
    rows, histograms = read_rows(run.metrics), read_histograms(run.histograms)
    events, event_notes = read_events(run.events)
    counts, count_notes = _counts(run)
    summary, summary_notes = _summary(run, rows, config.run.steps)
    return RunRecord(
        path=run.path,
        config=config,
        rows=rows,
        events=events,
        histograms=histograms,
        counts=counts,
        summary=summary,
        notes=(*summary_notes, *rows.notes, *histograms.notes, *event_notes, *count_notes),
    )


def read_events(path: Path) -> tuple[tuple[RunEvent, ...], tuple[str, ...]]:
    """The events that are not of a single dispatch, and notes on lines that are no events."""
    if not path.is_file():
        return (), (f"{path.name} is missing: the marks of events are missing too",)
    found: dict[int, dict[str, object]] = {}
    broken = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            kind = _KIND.search(line)
            if kind is not None and kind.group(1) in OF_ONE_DISPATCH:
                continue
            event = _event_of(line)
            if event is None:
                broken += line.endswith("\n")  # a last line without an end is being written now
            else:
                found[int(cast("int", event["number"]))] = event
    events = [found[number] for number in sorted(found)]
    notes = (f"{broken} lines of {path.name} are no events and are left out",) if broken else ()
    return tuple(_placed(events)), notes


def _event_of(line: str) -> dict[str, object] | None:
    try:
        read = json.loads(line)
    except json.JSONDecodeError:
        return None
    event = cast("dict[str, object]", read) if isinstance(read, dict) else {}
    whole = all(isinstance(event.get(key), kind) for key, kind in (("number", int), ("at_s", float | int), ("kind", str)))
    return event if whole else None


def _placed(events: Sequence[dict[str, object]]) -> Iterator[RunEvent]:
    """Events with their place between steps: by time, from one commit of the same trainer epoch to the next."""
    at = [float(cast("float", event["at_s"])) for event in events]
    for first, after in _epochs(events):
        opening = events[first] if events[first]["kind"] == EventKind.EPOCH_OPENED else {}
        begins = float(cast("int", opening.get("resumed_version") or 0))
        committed = [(at[i], _version_of(events[i])) for i in range(first, after) if events[i]["kind"] == EventKind.STEP_COMMITTED]
        times: NDArray[np.float64] = np.array([at[first], *(time for time, _ in committed)])
        steps: NDArray[np.float64] = np.array([begins, *(version for _, version in committed)])
        for index in range(first, after):
            event = events[index]
            fields = {k: v for k, v in event.items() if k not in ("number", "at_s", "kind") and isinstance(v, str | int | float | bool | None)}
            yield RunEvent(at_s=at[index], kind=str(event["kind"]), step=float(np.interp(at[index], times, steps)), fields=cast("Fields", fields))


def _epochs(events: Sequence[dict[str, object]]) -> list[tuple[int, int]]:
    """[first, after) of the events of each trainer epoch."""
    begins = [i for i, event in enumerate(events) if event["kind"] == EventKind.EPOCH_OPENED]
    if events and begins[:1] != [0]:
        begins.insert(0, 0)
    return list(zip(begins, [*begins[1:], len(events)], strict=True))


def _version_of(event: Mapping[str, object]) -> float:
    return float(PolicyVersion.parse(str(event["policy"])).version)


def _counts(run: RunDir) -> tuple[Counts | None, tuple[str, ...]]:
    try:
        reader = open_reader(run.path)
        try:
            return reader.counts(), ()
        finally:
            reader.close()
    except StoreError as error:
        return None, (f"the accounting of dispatches is missing: {error}",)


def _summary(run: RunDir, rows: MetricRows, steps: int) -> tuple[Mapping[str, object] | None, tuple[str, ...]]:
    where = f"partial, up to step {rows.last_step} of {steps}" if len(rows) else "partial: no step is on disk yet (a part is written every 50 steps)"
    if not run.summary.is_file():
        return None, (f"{where}: the run is still going, or an error ended it (there is no summary.json)",)
    try:
        summary = json.loads(run.summary.read_text())
    except (OSError, json.JSONDecodeError) as error:
        return None, (f"summary.json cannot be read: {error}",)
    if not isinstance(summary, dict):
        return None, ("summary.json is no object and is left out",)
    found = cast("dict[str, object]", summary)
    stopped = found.get("version")
    return found, (() if stopped == steps else (f"partial: the run was stopped after step {stopped} of {steps}",))
