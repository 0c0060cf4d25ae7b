"""Dashboards as Grafana takes them: what each kind of panel looks like, the variables, the marks on the time axes."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from grafana_foundation_sdk.builders import common as shared
from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, stat, statetimeline, table, text, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode
from panels import EVENTS
from runbook import ABOUT, TITLE, UID, Section, alert_sections, cause_sections, link_to
from shape import SEVERE, Dashboard, Limit, Panel, Row, of_run

from orchestrator.commands.dashboards_push import SOURCE_NAME, SOURCE_UID
from orchestrator.metrics.causes import LAYER, Cause
from orchestrator.metrics.layers import LAYERS

Drawn: TypeAlias = timeseries.Panel | heatmap.Panel | stat.Panel | statetimeline.Panel | table.Panel
SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
SIZES = {"stat": (4, 4), "name": (8, 4), "timeline": (24, 6), "table": (24, 8)}
"""Width and height of a kind of panel; the others are (12, 8)."""
STATISTICS = ["lastNotNull", "mean", "min", "max"]
"""Of each line, in the legend."""
RUNS = "query_result(sort_desc(max by (run) (last_over_time(concord_last_step_timestamp_seconds[30d]))))"
"""Every run of the last 30 days, whether or not it still goes on, the newest first."""


def json_of(page: Dashboard) -> str:
    """A dashboard as Grafana takes it."""
    builder = _page(page.uid, page.title, page.about)
    for name in page.variables:
        builder = builder.with_variable(_label_variable(name))
    number = 0
    for row in page.rows:
        number += 1
        panels = [
            _panel(panel, panel.layer or page.layer, page.variables).id(number + place)
            for place, panel in enumerate(row.panels, start=1)
        ]
        builder = _with_row(builder, row, number, panels)
        number += len(panels)
    return _json(builder)


def json_of_runbook() -> str:
    """The runbook as a dashboard."""
    builder, first = _page(UID, TITLE, ABOUT), 900
    causes = cause_sections()
    groups: list[tuple[str, Iterable[Section]]] = [("Alerts", alert_sections().values())]
    groups += [
        (f"Findings of layer {layer}: {LAYERS[layer].name}", [causes[str(one)] for one in Cause if LAYER[one] == layer])
        for layer in LAYERS
    ]
    for place, (title, sections) in enumerate(groups):
        builder = builder.with_row(dashboard.Row(title).id(first + place))
        for section in sections:
            shown = text.Panel().title(section.name).mode(TextMode.MARKDOWN).content(section.text)
            builder = builder.with_panel(shown.id(section.id).span(12).height(9))
    return _json(builder)


def _json(builder: dashboard.Dashboard) -> str:
    document = json.loads(json.dumps(builder.build(), cls=JSONEncoder))
    document["annotations"] = {"list": [_marks(event) for event in EVENTS]}  # the builder does not know their titles
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


def _page(uid: str, title: str, about: str) -> dashboard.Dashboard:
    sources = dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    current = model.VariableOption(text=SOURCE_NAME, value=SOURCE_UID)
    runs = dashboard.QueryVariable("run").label("run").datasource(SOURCE).query(RUNS).regex('/run="([^"]+)"/')
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["concord"])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(sources.current(current))
        .with_variable(runs.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED))
        .link(
            dashboard.DashboardLink("Concord")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags(["concord"])
            .include_vars(True)
            .keep_time(True)
        )
    )


def _label_variable(name: str) -> dashboard.QueryVariable:
    """The values of a label of the chosen run; all of them, unless the reader chooses."""
    metric = {"replica": "concord_replica_up", "block": "concord_block_grad_norm"}[name]
    variable = dashboard.QueryVariable(name).label(name).datasource(SOURCE)
    return (
        variable.query(f'label_values({metric}{{run="$run"}}, {name})')
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.NUMERICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _marks(event: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    return {
        "name": event.name,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "enable": event.on,
        "hide": False,
        "iconColor": event.colour,
        "expr": of_run(event.query),
        "step": "60s",
        "titleFormat": event.title,
        "tagKeys": "severity,diagnosis_layer,replica",
        "useValueForTime": event.at_value,
    }


def _with_row(builder: dashboard.Dashboard, row: Row, number: int, panels: list[Drawn]) -> dashboard.Dashboard:
    """What needs to be switched on is folded: Grafana then asks for it only when somebody opens the row."""
    heading = dashboard.Row(f"{row.title} (needs {row.needs})" if row.needs else row.title).id(number)
    if row.needs:
        for panel in panels:
            heading = heading.with_panel(panel)
        return builder.with_row(heading)
    builder = builder.with_row(heading)
    for panel in panels:
        builder = builder.with_panel(panel)
    return builder


def _panel(panel: Panel, layer: int, variables: tuple[str, ...]) -> Drawn:
    """One panel with its queries, in the colour of its layer where it has one line."""
    width, height = SIZES.get(panel.kind, (12, 8))
    builder = _kind(panel, layer).span(panel.wide or width).height(height).title(panel.title).unit(panel.shown_unit)
    builder = builder.datasource(SOURCE).description(_description(panel)).links(_links(panel))
    if panel.empty:
        builder = builder.no_value(panel.empty)
    now = panel.kind in ("stat", "name", "table")
    formats = {"heatmap": PromQueryFormat.HEATMAP, "table": PromQueryFormat.TABLE}
    for place, (expression, legend) in enumerate(panel.queries):
        whole = expression if panel.kind == "table" else of_run(expression, variables)
        query = prometheus.Dataquery().expr(whole).legend_format(legend).ref_id(chr(ord("A") + place))
        if now:  # over a range, a series that has ended would go on with its last value
            query = query.instant()
        builder = builder.with_target(query.format(formats.get(panel.kind, PromQueryFormat.TIME_SERIES)))
    return builder


def _kind(panel: Panel, layer: int) -> Drawn:
    if panel.kind in ("stat", "name"):
        return _number(panel, layer)
    if panel.kind == "heatmap":
        return heatmap.Panel().calculate(False)
    if panel.kind == "table":
        link = {"title": "Show this run", "url": "/d/concord-overview?var-run=${__value.raw}&from=now-7d&to=now"}
        hidden = model.DynamicConfigValue(id_val="custom.hidden", value=True)
        return (
            table.Panel()
            .override_by_name("run", [model.DynamicConfigValue(id_val="links", value=[link])])
            .override_by_regexp("Time|Value|__name__|job", [hidden])
        )
    if panel.kind == "timeline":
        return (
            statetimeline.Panel()
            .mappings(_mappings(panel.words))
            .merge_values(True)
            .show_value(common.VisibilityMode.NEVER)
            .legend(shared.VizLegendOptions().show_legend(False))
        )
    return _time_series(panel, layer)


def _time_series(panel: Panel, layer: int) -> timeseries.Panel:
    legend = (
        shared.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.TABLE)
        .placement(common.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(STATISTICS)
    )
    alone = len(panel.queries) == 1 and "{{" not in panel.queries[0][1]
    colour = dashboard.FieldColor()
    if alone:
        colour = colour.mode(model.FieldColorModeId.FIXED).fixed_color(LAYERS[layer].colour)
    else:  # so many lines that shades of one colour would all look alike
        colour = colour.mode(model.FieldColorModeId.PALETTE_CLASSIC_BY_NAME)
    builder = timeseries.Panel().color_scheme(colour).legend(legend).line_width(1).fill_opacity(0)
    if panel.limits:
        style = shared.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        builder = builder.thresholds(_thresholds(panel.limits)).thresholds_style(style)
    return builder


def _number(panel: Panel, layer: int) -> stat.Panel:
    """Large values, or the names of the series; in words where the panel has them."""
    names = common.BigValueTextMode.NAME if panel.kind == "name" else common.BigValueTextMode.AUTO
    builder = (
        stat.Panel()
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .text_mode(names)
        .mappings(_mappings(panel.words))
    )
    if panel.kind == "name" and not panel.words:
        graded = (Limit(1, True, "warning"), Limit(2, True, "critical"))
        builder = builder.thresholds(_thresholds(graded)).color_scheme(_graded())
        for section in (*alert_sections().values(), *cause_sections().values()):
            link = _linked_to(f"What to do: {section.name}", link_to(section))
            builder = builder.override_by_name(section.name, link)
    elif panel.limits:
        builder = builder.thresholds(_thresholds(panel.limits)).color_scheme(_graded())
    else:
        colour = dashboard.FieldColor().mode(model.FieldColorModeId.FIXED).fixed_color(LAYERS[layer].colour)
        builder = builder.color_scheme(colour)
    if "layer {{" in panel.queries[0][1]:
        for each in LAYERS.values():
            link = _linked_to(f"Layer {each.number}", _address(f"concord-layer-{each.number}"))
            builder = builder.override_by_name(f"layer {each.number}", link)
    return builder


def _graded() -> dashboard.FieldColor:
    return dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS)


def _linked_to(title: str, url: str) -> list[model.DynamicConfigValue]:
    return [model.DynamicConfigValue(id_val="links", value=[{"title": title, "url": url}])]


def _mappings(words: tuple[tuple[str, str], ...]) -> list[Any]:
    named = {
        str(value): model.ValueMappingResult(text=word, color=colour, index=value)
        for value, (word, colour) in enumerate(words)
    }
    return [model.ValueMap(options=named)] if named else []


def _thresholds(limits: Iterable[Limit]) -> dashboard.ThresholdsConfig:
    """Green where no alert begins."""
    rising = sorted(limits, key=lambda one: one.value)
    steps = [model.Threshold(value=None, color="green" if rising[0].above else SEVERE[rising[0].severity])]
    for place, limit in enumerate(rising):
        below = rising[place + 1] if place + 1 < len(rising) and not rising[place + 1].above else None
        colour = SEVERE[limit.severity] if limit.above else SEVERE[below.severity] if below else "green"
        steps.append(model.Threshold(value=limit.value, color=colour))
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def _description(panel: Panel) -> str:
    alerts = f"Alerts: {', '.join(panel.alerts)}." if panel.alerts else ""
    return "\n\n".join(part for part in (panel.description, alerts) if part)


def _address(uid: str) -> str:
    """A dashboard, of the same run and the same time."""
    return f"/d/{uid}?${{run:queryparam}}&${{datasource:queryparam}}&${{__url_time_range}}"


def _links(panel: Panel) -> list[Any]:
    """To the page of its layer, and to what to do when one of its alerts fires."""
    sections: Mapping[str, Section] = alert_sections()
    addresses = [(uid, _address(uid)) for uid in panel.pages]
    addresses += [(f"What to do: {name}", link_to(sections[name])) for name in panel.alerts]
    return [dashboard.DashboardLink(title).type(model.DashboardLinkType.LINK).url(url) for title, url in addresses]
