"""What a run shows while it runs: a live line for people, one JSON line a step for everything else."""

import json
import sys
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

SHOWN = (
    "step",
    "reward_mean",
    "reward_moving_10",
    "token_staleness_mean",
    "token_staleness_max",
    "tokens_per_second",
    "in_flight",
    "engine_busy",
    "trainer_busy",
    "step_seconds",
    "committed_version",
)
HEADERS = ("step", "reward", "last 10", "staleness mean/max", "tokens/s", "in flight", "engine busy", "trainer busy")
"""Of the live table."""


class Reporter(Protocol):
    """Where a run speaks to whoever started it."""

    def say(self, text: str) -> None:
        """One line about what happens now."""
        ...

    def step(self, row: Mapping[str, float], steps: int) -> None:
        """A step finished; `row` has the catalogue's columns."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class JsonReporter:
    """One JSON object a line: `{"event": ...}` or the shown columns of a step."""

    def say(self, text: str) -> None:
        self._write({"event": text})

    def step(self, row: Mapping[str, float], steps: int) -> None:
        self._write({key: round(row[key], 6) for key in SHOWN})

    def close(self) -> None:
        """Nothing to put back."""

    def _write(self, fields: Mapping[str, object]) -> None:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


class LiveReporter:
    """A table that is drawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._rows: list[tuple[str, ...]] = []

    def say(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False, highlight=False)

    def step(self, row: Mapping[str, float], steps: int) -> None:
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        self._rows = [*self._rows[-11:], step_cells(row, steps)]
        table = Table(box=None, pad_edge=False)
        for header in HEADERS:
            table.add_column(header, justify="right")
        for cells in self._rows:
            table.add_row(*cells)
        self._live.update(table)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def step_cells(row: Mapping[str, float], steps: int) -> tuple[str, ...]:
    """The cells of one step in the live table."""
    return (
        f"{int(row['step'])}/{steps}",
        f"{row['reward_mean']:.3f}",
        f"{row['reward_moving_10']:.3f}",
        f"{row['token_staleness_mean']:.2f} / {int(row['token_staleness_max'])}",
        f"{row['tokens_per_second']:,.0f}",
        f"{int(row['in_flight'])}",
        f"{row['engine_busy']:.0%}",
        f"{row['trainer_busy']:.0%}",
    )


def reporter_for_stdout() -> Reporter:
    """Live on a terminal, JSON lines otherwise."""
    console = Console()
    return LiveReporter(console) if console.is_terminal else JsonReporter()
