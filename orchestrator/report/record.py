"""Reads a run directory into the plain data of a report: what the doctor reads too, and beside it the config, the
store's counts and the places of events."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orchestrator.config import RunConfig
from orchestrator.run_dir.histograms import Histograms
from orchestrator.run_dir.layout import open_run_dir
from orchestrator.run_dir.reader import RunReader
from orchestrator.run_dir.record import Record, RunEvent
from rollout.errors import StoreError
from rollout.store.sqlite.journal import EventKind
from rollout.store.sqlite.reader import open_reader
from rollout.types.dispatch import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All that a report shows."""

    path: Path
    config: RunConfig
    rows: Record
    """Series of the steps that count."""
    events: tuple[RunEvent, ...]
    """Those that are not of a single dispatch, in the order of their numbers, with their places."""
    histograms: Histograms
    counts: Counts | None
    """What became of dispatches; None where the store cannot be read."""
    notes: tuple[str, ...]
    """What the report lacks, and why."""

    def events_of(self, *kinds: str) -> list[RunEvent]:
        return [event for event in self.events if event.kind in kinds]


def read_record(path: Path) -> RunRecord:
    """Everything that can be read of the run in `path`, also while it runs.

    Raises:
        UserError: it is no run directory, or another version of Concord wrote it.
    """
    run, config = open_run_dir(path)
    reader = RunReader(path)
    rows, notes = reader.read()
    histograms = reader.histograms()
    counts, lost = None, ()
    try:
        with closing(open_reader(run.path)) as store:
            counts = store.counts()
    except StoreError as error:
        lost = (f"the accounting of dispatches is missing: {error}",)
    return RunRecord(
        path=run.path,
        config=config,
        rows=rows,
        events=tuple(_placed(rows.events)),
        histograms=histograms,
        counts=counts,
        notes=(*notes, *histograms.notes, *lost),
    )


def _placed(events: Sequence[RunEvent]) -> Iterator[RunEvent]:
    """Events with their place between steps: by time, from one commit of the same trainer epoch to the next."""
    for first, after in _epochs(events):
        of_epoch = events[first:after]
        begins = of_epoch[0].step if of_epoch[0].kind == EventKind.EPOCH_OPENED else 0
        committed = [event for event in of_epoch if event.kind == EventKind.STEP_COMMITTED]
        times: NDArray[np.float64] = np.array([of_epoch[0].at_s, *(event.at_s for event in committed)])
        steps: NDArray[np.float64] = np.array([begins, *(event.step for event in committed)], dtype=np.float64)
        yield from (replace(event, place=float(np.interp(event.at_s, times, steps))) for event in of_epoch)


def _epochs(events: Sequence[RunEvent]) -> list[tuple[int, int]]:
    """[first, after) of the events of each trainer epoch."""
    begins = [i for i, event in enumerate(events) if event.kind == EventKind.EPOCH_OPENED]
    starts = begins if begins[:1] == [0] else [0, *begins]
    return [(first, after) for first, after in pairwise((*starts, len(events))) if first < after]
