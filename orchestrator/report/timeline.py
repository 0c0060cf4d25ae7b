"""The four curves, one a layer of diagnosis, above each other on one axis of steps, with versions and events below and
through them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from orchestrator.metrics.layers import LAYERS
from orchestrator.report.drawing import (
    PALE_INK,
    Figure,
    Trace,
    axis,
    bin_size,
    caption,
    fields_text,
    layout_of,
    numbers,
    plain,
    thinned,
)
from orchestrator.report.page import Table
from orchestrator.report.record import RunRecord
from orchestrator.run_dir.record import Record, RunEvent
from rollout.store.sqlite.journal import EventKind

MOST_LINES = 60
"""Events that are drawn through the panels and named in the table; further ones are in the strip below only."""
SCORES = ("● evaluation",)
LOG_SPAN = 100.0
"""A curve whose largest value is this many times its median is drawn on a logarithmic axis."""
LAYER_OF_EVENT = {"step_skipped": 3, "gradloc": 3, "gradloc_quarantined": 3, "evaluation": 1, "prompts_checked": 1}
"""Events of the run are of layer 4 unless said here, or unless they name their own layer."""
MOST_TEXT = 240
"""Characters of an event in the table."""
BACKGROUND = (
    EventKind.STEP_COMMITTED,
    EventKind.VERSION_COMMITTED,
    EventKind.VERSION_ORPHANED,
    EventKind.STEP_TAKEN_BACK,
    "consistency_baseline",
)
"""Events that are no marks of their own: the axis, the ticks of versions, and what belongs to a resume."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a panel."""

    column: str
    name: str
    bold: bool = True
    largest: bool = False
    """Where steps share a point, it is the largest of them instead of their mean."""


@dataclass(frozen=True, slots=True)
class Panel:
    """What is drawn for a layer."""

    layer: int
    unit: str
    curves: tuple[Curve, ...]


PANELS = (
    Panel(
        1, "reward", (Curve("reward_moving_10", "reward of ten steps"), Curve("reward_mean", "each step", bold=False))
    ),
    Panel(2, "nats", (Curve("policy_entropy", "entropy"), Curve("approx_kl", "KL of the step", bold=False))),
    Panel(3, "norm", (Curve("grad_norm", "gradient norm", largest=True),)),
    Panel(
        4,
        "nats",
        (
            Curve("consistency_gap_mean", "gap to the engines"),
            Curve("abs_rollout_difference_mean", "with staleness", bold=False),
        ),
    ),
)
TOPS = ((1.0, 0.82), (0.75, 0.57), (0.5, 0.32), (0.25, 0.1))
"""Upper and lower end of each panel, as shares of the height; the strip of marks lies below them."""


def timeline(record: RunRecord) -> Figure:
    """The figure; with no steps on disk its panels are empty."""
    rows, scores = record.rows, _scores(record.events_of("evaluation"))
    size = bin_size(len(rows))
    traces: list[Trace] = []
    axes: dict[str, object] = {}
    captions: list[dict[str, object]] = []
    for number, (panel, (top, bottom)) in enumerate(zip(PANELS, TOPS, strict=True), 1):
        layer = LAYERS[panel.layer]
        traces += [_curve(rows, curve, size, layer.colour, f"y{number}") for curve in panel.curves]
        more = SCORES if panel.layer == 1 and scores else ()
        captions.append(
            caption(f"<b>{layer.number} {layer.name}</b><br>{_names(rows, panel, more)}", top, layer.colour)
        )
        axes[f"yaxis{number}"] = axis(panel.unit, domain=[bottom, top], **_scale(rows, panel))
    marks = marks_of(record)
    traces += [_versions(record.events_of(EventKind.VERSION_COMMITTED)), *_diamonds(marks), *scores]
    strip = {
        "domain": [0.0, 0.05],
        "tickvals": [0, 1],
        "ticktext": ["versions", "events"],
        "range": [-0.6, 1.6],
        "showgrid": False,
        "fixedrange": True,
    }
    first = float(rows.column("step")[0]) if len(rows) else 0.0
    reach = max([float(rows.last_step), 1.0, *(event.place for event in record.events)])
    layout = layout_of(
        800,
        margin={"l": 52, "r": 12, "t": 40, "b": 44},
        **axes,
        yaxis5={**axis(), **strip},
        xaxis=axis(
            "step (= policy version after it)",
            anchor="y5",
            range=[min(first - 1.0, 0.0) - reach * 0.015, reach * 1.015],
        ),
        annotations=captions,
        shapes=[_line(event) for event in marks[:MOST_LINES]],
        hovermode="closest",
    )
    return Figure(key="timeline", traces=traces, layout=layout)


def _names(rows: Record, panel: Panel, more: tuple[str, ...]) -> str:
    """What is drawn; what was not measured is not."""
    there = [curve for curve in panel.curves if np.isfinite(rows.column(curve.column)).any()]
    names = [f"<b>{curve.name}</b>" if curve.bold else curve.name for curve in there]
    absent = [f"{curve.name} not measured" for curve in panel.curves if curve not in there]
    return ", ".join((*names, *more, *absent))


def _curve(rows: Record, curve: Curve, size: int, colour: str, y: str) -> Trace:
    """The curve, with `size` steps a point."""
    steps = thinned(rows.column("step"), size, lambda block: float(block[-1]))
    values = rows.column(curve.column)
    return {
        "type": "scatter",
        "mode": "lines" if len(steps) > 1 else "markers",
        "name": curve.name,
        "x": numbers(steps),
        "y": numbers(thinned(values, size, lambda block: float(block.max() if curve.largest else block.mean()))),
        "yaxis": y,
        "line": {"color": colour, "width": 2.2 if curve.bold else 1.0},
        "opacity": 1.0 if curve.bold else 0.55,
        "hovertemplate": "step %{x}: %{y:.4g}<extra>" + curve.name + "</extra>",
    }


def _scale(rows: Record, panel: Panel) -> dict[str, object]:
    values = np.concatenate([rows.column(curve.column) for curve in panel.curves])
    positive = values[np.isfinite(values) & (values > 0)]
    wide = len(panel.curves) == 1 and len(positive) and positive.max() > LOG_SPAN * np.median(positive)
    return {"type": "log", "dtick": 1} if wide else {"rangemode": "tozero"}


def marks_of(record: RunRecord) -> list[RunEvent]:
    """Events that are drawn as marks. Scores of evaluations are points of the first panel instead."""
    return [
        event for event in record.events if event.kind not in (*BACKGROUND, "evaluation") and not _is_routine(event)
    ]


def _is_routine(event: RunEvent) -> bool:
    """What every start leaves is nothing to look at; a resume is, and so is a check of prompts that found something."""
    if event.kind == "prompts_checked":
        return not event.fields.get("duplicates") and not event.fields.get("overlapping")
    return event.kind == EventKind.EPOCH_OPENED and event.fields.get("trainer_epoch") == 1


def marks_table(marks: Sequence[RunEvent]) -> Table | None:
    """The marks in words, for a reader without a pointer."""
    rows = [
        (f"{event.place:.1f}", label_of(event), fields_text(event.fields)[:MOST_TEXT]) for event in marks[:MOST_LINES]
    ]
    heads, folded = ("step", "event", "what it says"), f"Events in words ({len(marks):,})"
    return Table(heads, rows, folded, text=True) if rows else None


def label_of(event: RunEvent) -> str:
    """The kind, in words."""
    return "resumed" if event.kind == EventKind.EPOCH_OPENED else event.kind.replace("_", " ")


def layer_of(event: RunEvent) -> int:
    """Where to look first."""
    named = event.fields.get("layer", event.fields.get("diagnosis_layer"))
    return named if isinstance(named, int) and named in LAYERS else LAYER_OF_EVENT.get(event.kind, 4)


def _versions(events: Sequence[RunEvent]) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [round(event.place, 3) for event in events],
        "y": [0] * len(events),
        "yaxis": "y5",
        "text": [f"{plain(event.text('policy'))} is in the engines" for event in events],
        "marker": {"symbol": "line-ns", "size": 9, "line": {"width": 1, "color": PALE_INK}},
        "hovertemplate": "%{text}<extra></extra>",
    }


def _diamonds(events: Sequence[RunEvent]) -> list[Trace]:
    by_layer = {number: list(group) for number, group in groupby(sorted(events, key=layer_of), layer_of)}
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [round(event.place, 3) for event in of_layer],
            "y": [1] * len(of_layer),
            "yaxis": "y5",
            "text": [_hover_text(event) for event in of_layer],
            "marker": {"symbol": "diamond", "size": 9, "color": LAYERS[number].colour},
            "hovertemplate": "%{text}<extra></extra>",
        }
        for number, of_layer in by_layer.items()
    ]


def _hover_text(event: RunEvent) -> str:
    text = plain(fields_text(event.fields))
    lines = [text[i : i + 60] for i in range(0, min(len(text), 240), 60)]
    return "<br>".join([f"<b>{plain(label_of(event))}</b>, at step {event.place:.1f}", *lines])


def _scores(events: Sequence[RunEvent]) -> list[Trace]:
    """Evaluation scores as points of the first panel, at the version that they score: one trace a fingerprint, a line
    only between scores of the same one."""
    scored = [event for event in events if isinstance(event.fields.get("score"), int | float)]
    by_print: dict[str, list[RunEvent]] = {}
    for event in scored:
        by_print.setdefault(str(event.fields.get("fingerprint", "")), []).append(event)
    symbols = ("circle", "square", "triangle-up", "cross", "x", "star")
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "evaluation",
            "x": [event.fields.get("version", round(event.place, 3)) for event in group],
            "y": [event.fields["score"] for event in group],
            "yaxis": "y1",
            "text": [_hover_text(event) for event in group],
            "line": {"color": "#111111", "width": 1, "dash": "dot"},
            "marker": {"symbol": symbols[index % len(symbols)], "size": 7, "color": "#111111"},
            "hovertemplate": "%{text}<extra></extra>",
        }
        for index, group in enumerate(by_print.values())
    ]


def _line(event: RunEvent) -> dict[str, object]:
    style = {"color": LAYERS[layer_of(event)].colour, "width": 1, "dash": "dot"}
    ends = {"x0": event.place, "x1": event.place, "y0": 0.06, "y1": 1.0}
    return {"type": "line", "xref": "x", "yref": "paper", **ends, "line": style, "opacity": 0.45, "layer": "below"}
