"""A run as series: columns by step, failures by reason, events. Numpy only; where it comes from (files, a live loop) it
never knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from orchestrator.metrics.catalogue import BLOCK_CATALOGUE, COLUMNS, ROW_METRICS
from orchestrator.metrics.types import UNMEASURED
from orchestrator.run_dir.history import History
from rollout.errors import ConcordError

Values = NDArray[np.float64]
_MEASURED_BY: Mapping[str, str] = {metric.column: metric.measured_by for metric in ROW_METRICS if metric.measured_by}
_BLOCK_SIGNALS = frozenset(metric.column for metric in BLOCK_CATALOGUE)
_DECLARED = frozenset(COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """One event of the run."""

    kind: str
    step: int
    """The trainer's version when it happened."""
    at_s: float = float("nan")
    """Unix time; NaN where nobody asks."""
    place: float = float("nan")
    """Between the steps, where a report asks: 12.5 is half-way between the ends of steps 12 and 13."""
    fields: Mapping[str, object]
    """What the kind adds; from a file without lists and objects."""

    def number(self, name: str) -> float:
        """A numeric field; NaN where it is missing or null."""
        value = self.fields.get(name)
        return float(value) if isinstance(value, int | float) else float("nan")

    def text(self, name: str) -> str:
        """A field as text; empty where it is missing."""
        value = self.fields.get(name)
        return "" if value is None else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A run up to its newest row. All series have one value a row, oldest first."""

    steps: NDArray[np.int64]
    """[n], rising."""
    columns: Mapping[str, Values]
    """[n] by column; NaN where nothing was measured, or where the value itself is not finite."""
    blocks: Mapping[tuple[str, str], Values] = field(default_factory=dict[tuple[str, str], Values])
    """[n] by (signal, block); NaN where it was not measured."""
    tallies: Mapping[str, Values] = field(default_factory=dict[str, Values])
    """[n] dispatches ended until the end of the step, by `failed:REASON` and `rejected:REASON`."""
    events: tuple[RunEvent, ...] = ()
    history: History = field(default_factory=History)
    """What became of dispatches until now, beyond the newest row too, and how the run stands."""

    def __len__(self) -> int:
        return int(self.steps.size)

    def column(self, name: str) -> Values:
        """[n] a column of the catalogue; all NaN where this run has none.

        Raises:
            ConcordError: the catalogue declares no such column.
        """
        if name not in _DECLARED:
            raise ConcordError(
                f"got column {name!r}, which the catalogue does not declare; see orchestrator/metrics/catalogue.py"
            )
        found = self.columns.get(name)
        return np.full(self.steps.size, np.nan) if found is None else found

    def tally(self, name: str) -> Values:
        """[n] a tally; zeros where nothing ended so."""
        found = self.tallies.get(name)
        return np.zeros(self.steps.size) if found is None else found

    def of_blocks(self, signal: str) -> Mapping[str, Values]:
        """Block -> [n] of one signal.

        Raises:
            ConcordError: the catalogue declares no such signal.
        """
        if signal not in _BLOCK_SIGNALS:
            raise ConcordError(
                f"got signal {signal!r} of blocks, which the catalogue does not declare; see "
                "orchestrator/metrics/catalogue.py"
            )
        return {block: values for (name, block), values in self.blocks.items() if name == signal}

    def of_kind(self, *kinds: str) -> list[RunEvent]:
        return [event for event in self.events if event.kind in kinds]

    @property
    def last_step(self) -> int:
        """Step of the newest row; 0 before the first."""
        return int(self.steps[-1]) if self.steps.size else 0


def measured(columns: Mapping[str, Values]) -> dict[str, Values]:
    """Columns with NaN where the catalogue says that nothing was measured."""
    return {
        name: values
        if (by := columns.get(_MEASURED_BY.get(name, ""))) is None
        else np.where(by == UNMEASURED, np.nan, values)
        for name, values in columns.items()
    }


def tallies_by_kind(tallies: Sequence[Mapping[str, float]]) -> dict[str, Values]:
    """[n] by kind, from one tally a row; 0 where a row has none of it."""
    kinds = sorted({kind for tally in tallies for kind in tally})
    return {kind: np.array([tally.get(kind, 0.0) for tally in tallies], dtype=np.float64) for kind in kinds}


def record_of_rows(
    rows: Sequence[Mapping[str, float]],
    *,
    tallies: Sequence[Mapping[str, float]] = (),
    events: Sequence[RunEvent] = (),
    blocks: Mapping[tuple[str, str], Mapping[int, float]] | None = None,
    history: History | None = None,
) -> Record:
    """A record from rows in order of their steps.

    Args:
        tallies: one a row, or none at all.
        blocks: (signal, block) -> step -> value.
    """
    names = sorted({name for row in rows for name in row if name in _DECLARED})
    steps = np.array([row["step"] for row in rows], dtype=np.int64)
    columns = measured({name: np.array([row.get(name, np.nan) for row in rows], dtype=np.float64) for name in names})
    of_blocks = {
        key: np.array([values.get(int(step), np.nan) for step in steps]) for key, values in (blocks or {}).items()
    }
    return Record(
        steps=steps,
        columns=columns,
        blocks=of_blocks,
        tallies=tallies_by_kind(tallies),
        events=tuple(events),
        history=history or History(),
    )
