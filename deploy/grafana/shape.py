"""What a dashboard is made of, as data: rows of panels with their queries. Units and descriptions come from the
catalogue of metrics, thresholds from the alerts, unless a panel says otherwise. It knows nothing of Grafana's JSON."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from orchestrator.metrics.catalogue import BY_COLUMN, DECLARED
from orchestrator.metrics.types import Metric, MetricType

RULES = Path(__file__).resolve().parents[1] / "prometheus" / "rules"
RATE = "$__rate_interval"
SERIES = re.compile(r"\b(concord[_:][a-z0-9_:]+|vllm:[a-z0-9_:]+|ALERTS|up)\b(\{)?(?!\()")
"""Series that belong to a run, with the brace of their selector."""
UNITS = {
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "percentunit",
    "nats": "suffix:nats",
    "tokens": "count:tokens",
    "groups": "count:groups",
    "tokens/s": "count:tokens/s",
    "rate": "sci",
}
"""Grafana's name of a unit of the catalogue; what has none is a plain number."""
COUNTED = ("steps", "updates", "restarts", "trajectories", "versions", "failures", "findings", "searches", "passes")
PLAIN = "short"
SEVERE = {"warning": "orange", "critical": "red"}
_COMPARED = re.compile(
    r"^(?:\()?(?:\w+_over_time\()?(concord[_:][a-z0-9_:]+)(?:\{[^}]*\})?(?:\[\w+\]\))? (>|<) ([\d.e-]+)(?![\d.]* \*)"
)
"""An alert that begins by comparing a metric, or its mean over some minutes, with a number."""


@dataclass(frozen=True)
class Panel:
    """One drawing. `queries` are (PromQL, legend)."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = ""
    """One of Grafana's; empty: that of the first metric."""
    layer: int = 0
    """0: that of its page."""
    kind: str = "timeseries"
    """timeseries, stat, name (the legend of each series that the query leaves), timeline, heatmap or table."""
    help: str = ""
    """What is to be known besides the meaning of its metrics."""
    words: tuple[tuple[str, str], ...] = ()
    """What to write for the values 0, 1, ...: (word, colour)."""
    alerts: tuple[str, ...] = ()
    """Alerts on what it shows: it links to their sections of the runbook and draws their thresholds."""
    pages: tuple[str, ...] = ()
    """Dashboards that it links to, by uid."""
    empty: str = ""
    """What to write where the query finds nothing."""
    wide: int = 0
    """Columns of the 24; 0: as usual for its kind."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What it asks for, in order."""
        return tuple(
            dict.fromkeys(
                metric for query, _ in self.queries for name, _ in SERIES.findall(query) if (metric := metric_of(name))
            )
        )

    @property
    def shown_unit(self) -> str:
        """Of its values."""
        return self.unit or (unit_of(self.metrics[0], self.queries[0][0]) if self.metrics else PLAIN)

    @property
    def description(self) -> str:
        """What it shows, for somebody who meets it for the first time."""
        meanings = [f"`{metric.name}`: {metric.help}" for metric in self.metrics if metric.unit != "info"]
        return "\n\n".join(part for part in (self.help, *meanings) if part)

    @property
    def limits(self) -> tuple["Limit", ...]:
        """Thresholds of its alerts, each once."""
        found = {limit.value: limit for alert in self.alerts for limit in limits_of(alert)}
        return tuple(found[value] for value in sorted(found))


@dataclass(frozen=True)
class Limit:
    """Where an alert begins."""

    value: float
    above: bool
    """It begins above the value, not below."""
    severity: str


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]
    needs: str = ""
    """What has to be switched on for it to have data: a row like that is folded. Empty: every run fills it."""


@dataclass(frozen=True)
class Dashboard:
    """One page."""

    uid: str
    title: str
    about: str
    layer: int
    """For panels that name none of their own."""
    rows: tuple[Row, ...]
    variables: tuple[str, ...] = ()
    """Labels that the reader may narrow it to, besides the run: `replica`, `block`."""

    @property
    def panels(self) -> Iterator[Panel]:
        """Those of all rows."""
        return (panel for row in self.rows for panel in row.panels)


def metric_of(sample: str) -> Metric | None:
    """The declared metric that a sample belongs to."""
    return DECLARED.get(sample) or DECLARED.get(re.sub("_(bucket|sum|count)$", "", sample))


def unit_of(metric: Metric, query: str) -> str:
    """Grafana's unit of what a query makes of a metric."""
    rate = "rate(" in query
    if metric.unit == "seconds" and rate:
        return "percentunit"
    if metric.unit in UNITS:
        return f"{UNITS[metric.unit]}/s" if rate else UNITS[metric.unit]
    counted = metric.type is MetricType.COUNTER or metric.unit in COUNTED
    return (f"count:{metric.unit}" + ("/s" if rate else "")) if counted else PLAIN


@cache
def alert_rules() -> dict[str, dict[str, Any]]:
    """The alerts by name, in the order of their file."""
    document = yaml.safe_load((RULES / "alerts.yml").read_text())
    return {rule["alert"]: rule for group in document["groups"] for rule in group["rules"]}


def limits_of(alert: str) -> Iterator[Limit]:
    """The number that the alert compares a metric with, where it begins with such a comparison."""
    rule = alert_rules()[alert]
    found = _COMPARED.match(rule["expr"].strip())
    if found and float(found[3]):
        yield Limit(float(found[3]), found[2] == ">", rule["labels"].get("severity", "warning"))


def of_run(expression: str, variables: tuple[str, ...] = ()) -> str:
    """The expression for the run that the reader has chosen, and for the replicas and blocks: each series gets the
    selector."""

    def selected(found: re.Match[str]) -> str:
        metric = metric_of(found[1])
        labels = metric.label_names if metric else ("replica",) if found[1].startswith("vllm:") else ()
        chosen = ",".join(['run="$run"', *(f'{label}=~"${label}"' for label in variables if label in labels)])
        return f"{found[1]}{{{chosen}" + ("," if found[2] else "}")

    return SERIES.sub(selected, expression)


def lines(title: str, *columns: str, unit: str = "", layer: int = 0, help: str = "", **more: Any) -> Panel:  # noqa: ANN401
    """A line for each metric without labels, named by its column."""
    return Panel(title, tuple((BY_COLUMN[name].name, name) for name in columns), unit, layer, help=help, **more)


def by(title: str, expression: str, *labels: str, unit: str = "", help: str = "", **more: Any) -> Panel:  # noqa: ANN401
    """A line for each value of the labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    return Panel(title, ((expression, legend),), unit, help=help, **more)


def rates(title: str, name: str, *labels: str, unit: str = "", help: str = "", **more: Any) -> Panel:  # noqa: ANN401
    """Rate of a counter, a line for each value of the labels."""
    return by(title, f"rate(concord_{name}_total[{RATE}])", *labels, unit=unit, help=help, **more)


def spread(title: str, name: str, selector: str = "", help: str = "", **more: Any) -> Panel:  # noqa: ANN401
    """A histogram over time."""
    query = f"sum by (le) (increase({BY_COLUMN[name].name}_bucket{selector}[{RATE}]))"
    return Panel(title, ((query, "{{le}}"),), kind="heatmap", help=help, **more)


def number(title: str, expression: str, unit: str = "", help: str = "", **more: Any) -> Panel:  # noqa: ANN401
    """One number, as it is now."""
    return Panel(title, ((expression, ""),), unit, kind="stat", help=help, **more)
