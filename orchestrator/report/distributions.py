"""Bars of what was counted by bucket: staleness of trained tokens, and importance ratios with their parts."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from orchestrator.metrics.layers import LAYERS
from orchestrator.report.drawing import Figure, Trace, axis, layout_of, numbers
from orchestrator.run_dir.histograms import Histograms

STALENESS = "token_staleness_steps"
LOG_RATIO = "log_ratio_nats"
AUDITED = "audited_log_ratio_nats"
SYSTEM = LAYERS[4].colour
PARTS: Mapping[str, tuple[str, str]] = {
    "part=total": ("trainer now / rollout: staleness and engine", "#52606d"),
    "part=stale": ("staleness alone", LAYERS[2].colour),
    "part=engine": ("engine alone", SYSTEM),
}
"""Labels of a series of `log_ratio_nats` -> what it says, and its colour."""


def staleness_figure(histograms: Histograms, max_staleness: int) -> Figure | None:
    """Trained tokens by age; None where none were counted."""
    series = histograms.of(STALENESS)
    if not series or not (counts := _summed(series)).sum():
        return None
    uppers = histograms.uppers(STALENESS)
    shown = max(int(np.flatnonzero(counts)[-1]), int(np.searchsorted(uppers, max_staleness))) + 1
    labels = whole_numbers(uppers)[:shown]
    share = counts[:shown] / counts.sum()
    bars: Trace = {
        "type": "bar",
        "x": labels,
        "y": numbers(share * 100),
        "text": [f"{value:.0%}" if value >= 0.005 else "" for value in share.tolist()],
        "textposition": "outside",
        "cliponaxis": False,
        "customdata": counts[:shown].tolist(),
        "marker": {"color": SYSTEM},
        "hovertemplate": "%{x} steps old: %{customdata} tokens, %{y:.2f} %<extra></extra>",
    }
    layout = layout_of(
        360, xaxis=axis("age in steps when trained on", type="category"), yaxis=axis("% of trained tokens"), bargap=0.25
    )
    return Figure(key="staleness", traces=[bars], layout=layout)


def ratio_figure(histograms: Histograms) -> Figure | None:
    """Tokens by importance ratio, a line a part; the axis of shares is logarithmic, since the tails are what matters.
    None where none were counted."""
    series = {labels: counts for labels, counts in histograms.of(LOG_RATIO).items() if counts.sum()}
    uppers = histograms.uppers(LOG_RATIO)
    lines = [(PARTS.get(labels, (labels, "#52606d")), counts) for labels, counts in series.items()]
    audited = histograms.of(AUDITED)
    if not any(label == "part=engine" for label in series) and audited and _summed(audited).sum():
        uppers = histograms.uppers(AUDITED)
        lines.append((("engine alone, audited groups", SYSTEM), _summed(audited)))
    if not lines:
        return None
    categories = ratio_labels(uppers)
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": categories,
            "y": [value or None for value in numbers(counts / counts.sum() * 100)],
            "connectgaps": False,
            "line": {"color": colour, "width": 1.5, "shape": "hvh"},
            "marker": {"color": colour, "size": 5},
            "customdata": counts.tolist(),
            "hovertemplate": "ratio %{x}: %{customdata} tokens, %{y:.3g} %<extra>" + name + "</extra>",
        }
        for (name, colour), counts in lines
    ]
    layout = layout_of(
        360,
        xaxis=axis(
            "importance ratio",
            type="category",
            tickangle=-90,
            tickfont={"size": 10},
            categoryorder="array",
            categoryarray=categories,
        ),
        yaxis=axis("% of tokens", type="log", tickformat=".3~g", dtick=1),
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "xanchor": "left"},
        margin={"l": 52, "r": 12, "t": 60, "b": 70},
    )
    return Figure(key="ratios", traces=traces, layout=layout)


def whole_numbers(uppers: Sequence[float]) -> list[str]:
    """Names of buckets of whole numbers: `2`, `5-6`, `above 32`."""
    names: list[str] = []
    below = -1.0
    for upper in uppers:
        names.append(
            f"above {below:g}"
            if math.isinf(upper)
            else f"{upper:g}"
            if upper - below <= 1
            else f"{below + 1:g}-{upper:g}"
        )
        below = upper
    return names


def ratio_labels(uppers: Sequence[float]) -> list[str]:
    """Names of buckets of log-ratios, as ratios: `1.05-1.1`."""
    ends = [0.0, *(math.exp(upper) for upper in uppers)]
    return [_between(low, high) for low, high in pairwise(ends)]


def _between(low: float, high: float) -> str:
    if low == 0.0:
        return f"to {_ratio(high)}"
    return f"above {_ratio(low)}" if math.isinf(high) else f"{_ratio(low)}-{_ratio(high)}"


def _ratio(value: float) -> str:
    return (
        f"{value:.3f}"
        if 0.99 < value < 1.01
        else f"{value:.0f}"
        if value >= 10
        else f"{value:.2g}"
        if value < 0.95
        else f"{value:.3g}"
    )


def _summed(series: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.sum(np.stack(list(series.values())), axis=0)
