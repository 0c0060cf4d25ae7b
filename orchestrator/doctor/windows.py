"""The words in which rules speak of series: what holds in most of the newest rows, and since when; how far something
moved from one end of a run to the other; what was counted over the newest rows."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from orchestrator.doctor.findings import Evidence
from orchestrator.doctor.trends import Change, level, share, since
from orchestrator.run_dir.record import Record, Values

Flags: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]
WINDOW = 10
"""Rows of a level."""
PERSISTENCE = 0.8
"""Share of the window's rows in which a condition must hold."""


@dataclass(frozen=True, slots=True)
class Held:
    """A condition that holds in most of the newest rows."""

    level: float
    """Mean of the values that it is about, in those rows."""
    since: int


def held(record: Record, values: Values, flags: Flags, begun: Flags | None = None) -> Held | None:
    """The condition `flags` [n], where it holds now; None where it does not hold in `PERSISTENCE` of the newest
    `WINDOW` rows, or there are fewer.

    Args:
        begun: [n] where `since` is to be read off, if not `flags`.
    """
    if flags.size < WINDOW or share(flags[-WINDOW:]) < PERSISTENCE:
        return None
    return Held(level(values[-WINDOW:]), since(record.steps, flags if begun is None else begun))


def newest(record: Record, series: str, *numbers: tuple[str, float], rows: int = WINDOW) -> Evidence:
    """Numbers that a rule read off the last `rows` rows of a series."""
    return Evidence(series, int(record.steps[-rows]), record.last_step, numbers)


def moved(record: Record, series: str, change: Change, *numbers: tuple[str, float]) -> Evidence:
    """How far a series moved over the whole run."""
    return Evidence(
        series, int(record.steps[0]), record.last_step, (("from", change.before), ("to", change.after), *numbers)
    )


def gained(values: Values, rows: int) -> float:
    """What a running count grew by in the last `rows` rows."""
    return float(values[-1] - values[-1 - rows])
