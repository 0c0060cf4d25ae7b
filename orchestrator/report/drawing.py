"""What all figures of a report share: plain plotly specifications as data, their look, and how long series are thinned.
It imports no plotly."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from orchestrator.run_dir.record import Values

Trace: TypeAlias = dict[str, object]
Layout: TypeAlias = dict[str, object]

INK, PALE_INK, GRID = "#1f2933", "#616e7c", "#e4e7eb"
MOST_POINTS = 1500
"""Points of a curve; a longer series is reduced to means of as many steps as it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One drawing."""

    key: str
    """Names it within its page."""
    traces: list[Trace]
    layout: Layout

    def spec(self) -> dict[str, object]:
        """The figure as plotly takes it."""
        return {"data": self.traces, "layout": self.layout}


def layout_of(height: int, **more: object) -> Layout:
    """The look of every figure: no box, few lines, text that a phone can show."""
    return {
        "height": height,
        "margin": {"l": 52, "r": 12, "t": 30, "b": 44},
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hoverlabel": {"align": "left", "namelength": -1},
        "showlegend": False,
        **more,
    }


def axis(title: str = "", **more: object) -> dict[str, object]:
    """An axis with its unit."""
    return {"title": {"text": title, "standoff": 6}, "gridcolor": GRID, "zeroline": False, "automargin": True, **more}


def caption(text: str, y: float, colour: str) -> dict[str, object]:
    """A line of text above a panel, from the left edge of the drawing; `y` in units of its height. plotly reads a
    little HTML in it."""
    where = {
        "xref": "paper",
        "yref": "paper",
        "x": 0.0,
        "xshift": -48,
        "y": y,
        "yshift": 6,
        "xanchor": "left",
        "yanchor": "bottom",
    }
    return {**where, "text": text, "showarrow": False, "font": {"color": colour, "size": 12}, "align": "left"}


def bin_size(num_steps: int) -> int:
    """Steps that share one point."""
    return max(1, math.ceil(num_steps / MOST_POINTS))


def thinned(values: Values, size: int, reduce: Callable[[Values], float]) -> Values:
    """`values` with each `size` of them reduced to one; NaN where none of them was measured."""
    if size == 1:
        return values
    blocks = [values[i : i + size] for i in range(0, len(values), size)]
    measured = [block[~np.isnan(block)] for block in blocks]
    return np.array([reduce(block) if len(block) else math.nan for block in measured])


def numbers(values: Values) -> list[float | None]:
    """Values for JSON: six digits, and nothing where there is no finite number."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]


def plain(text: str) -> str:
    """Text of the run for plotly, which would read tags in it."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def shown(value: object) -> str:
    """A field of an event, short."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "none" if value is None else str(value)


def fields_text(fields: Mapping[str, object]) -> str:
    """`a 1, b 2`, for a hover text."""
    return ", ".join(f"{key} {shown(value)}" for key, value in fields.items())
