"""Where the time of a step went, and what became of every dispatch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.metrics.layers import LAYERS
from orchestrator.report.drawing import INK, Figure, Trace, axis, layout_of, numbers, thinned
from orchestrator.run_dir.record import Record, Values
from rollout.types.dispatch import Counts

MOST_BARS = 120
PHASES = (
    ("wait", "waits for a batch", "#cbd2d9"),
    ("train", "trains", LAYERS[4].colour),
    ("publish", "publishes", "#4aa8c9"),
    ("checkpoint", "checkpoints", INK),
)
"""Column between `step_` and `_seconds`, what the trainer does in it, and its colour. Waiting is pale: it is what is to
be small."""


def phases_figure(rows: Record) -> Figure | None:
    """Seconds of each step by phase; None without a step. Long runs share bars, each the mean of its steps."""
    if not len(rows):
        return None
    size = max(1, -(-len(rows) // MOST_BARS))
    steps = thinned(rows.column("step"), size, lambda block: float(block[-1]))
    seconds = [(name, colour, _mean(rows.column(f"step_{phase}_seconds"), size)) for phase, name, colour in PHASES]
    rest = np.clip(
        _mean(rows.column("step_seconds"), size) - sum((values for _, _, values in seconds), np.zeros(len(steps))),
        0.0,
        None,
    )
    traces = [
        _bars(name, colour, steps, values) for name, colour, values in (*seconds, ("between steps", "#f0b429", rest))
    ]
    layout = layout_of(
        320,
        barmode="stack",
        bargap=0.05,
        xaxis=axis("step" if size == 1 else f"step (a bar is the mean of {size})"),
        yaxis=axis("seconds a step"),
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        margin={"l": 52, "r": 12, "t": 60, "b": 44},
    )
    return Figure(key="phases", traces=traces, layout=layout)


def _mean(values: Values, size: int) -> Values:
    return thinned(values, size, lambda block: float(block.mean()))


def _bars(name: str, colour: str, steps: Values, values: Values) -> Trace:
    return {
        "type": "bar",
        "name": name,
        "x": numbers(steps),
        "y": numbers(values),
        "marker": {"color": colour, "line": {"width": 0}},
        "hovertemplate": "step %{x}: %{y:.3g} s<extra>" + name + "</extra>",
    }


@dataclass(frozen=True, slots=True)
class EndingCount:
    """So many dispatches came to this."""

    name: str
    groups: int
    colour: str


def endings(counts: Counts) -> list[EndingCount]:
    """What became of every dispatch; their numbers add up to all of them (invariant 1)."""
    held = sum(groups for _, groups in counts.trained_held)
    return [
        EndingCount("trained", counts.trained + held, LAYERS[1].colour),
        EndingCount("in flight", counts.in_flight - held, "#9fb3c8"),
        *(
            EndingCount(f"rejected: {reason.replace('_', ' ')}", groups, "#c76a00")
            for reason, groups in counts.rejected
        ),
        *(EndingCount(f"failed: {reason.replace('_', ' ')}", groups, "#b42318") for reason, groups in counts.failed),
    ]


def endings_figure(found: Sequence[EndingCount]) -> Figure:
    """A bar for each ending, the most frequent on top."""
    ordered = sorted(found, key=lambda ending: ending.groups)
    bars: Trace = {
        "type": "bar",
        "orientation": "h",
        "y": [ending.name for ending in ordered],
        "x": [ending.groups for ending in ordered],
        "text": [f"{ending.groups:,}" for ending in ordered],
        "textposition": "auto",
        "cliponaxis": False,
        "marker": {"color": [ending.colour for ending in ordered]},
        "hovertemplate": "%{y}: %{x} dispatches<extra></extra>",
    }
    margin = {"l": 8, "r": 24, "t": 8, "b": 44}
    layout = layout_of(
        90 + 34 * len(ordered),
        xaxis=axis("dispatches (groups)", rangemode="tozero"),
        yaxis=axis(ticksuffix=" "),
        margin=margin,
    )
    return Figure(key="dispatches", traces=[bars], layout=layout)
