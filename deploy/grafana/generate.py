"""Writes the dashboards as Grafana takes them, docs/user/dashboards.md, and the overview's panels in README.md, from
`panels.py`.

python deploy/grafana/generate.py            write them
python deploy/grafana/generate.py --check    say which are not fresh; exit status 1 if any
"""

import json
import sys
from pathlib import Path
from typing import TypeAlias

from grafana_foundation_sdk.builders import common as shared
from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the checkout, whether or not it is installed

from panels import DASHBOARDS, Dashboard, Panel, of_run  # noqa: E402

from orchestrator.metrics.layers import LAYERS  # noqa: E402

Drawn: TypeAlias = timeseries.Panel | heatmap.Panel | stat.Panel
SOURCE = model.DataSourceRef(type_val="prometheus", uid="concord-prometheus")
WIDTH, HEIGHT, STAT_HEIGHT = 12, 8, 4
BEGIN, END = "<!-- panels of the overview, written by deploy/grafana/generate.py -->", "<!-- end of them -->"
DOCUMENT = """\
<!-- Written by deploy/grafana/generate.py from deploy/grafana/panels.py. Change that, then run it again. -->
# Dashboards

Seven dashboards for Grafana 11 or newer, over the [metrics](metrics.md) in Prometheus and what its recording rules
make of them. They are code (`deploy/grafana/panels.py`); the JSON beside it is what Grafana takes.

```
concord dashboards push --url http://127.0.0.1:3000 --token TOKEN --prometheus http://127.0.0.1:9090
```

makes folder, data source and dashboards, or brings them up to date, and says what changed; a second push changes
nothing. TOKEN is of a service account with the role Admin (data sources need it). Every panel is of the run chosen at
the top: each series has `{{run="$run"}}`, which the tables leave out. Each layer of diagnosis has its colour, the
same as in the [report](report.md): {colours}.

What a push meets: Grafana that cannot be reached or answers with a server error is asked five times; a token that is
not accepted, a version before 11, another dashboard of the same title, and a dashboard that somebody changes
meanwhile are errors that say the cure. Nothing is written over unseen. Each change is printed when it is made; one that
comes before an error stays, and the next push goes on from there.
"""


def main() -> int:
    """Write or check; the exit status."""
    check = "--check" in sys.argv[1:]
    stale = 0
    for path, text in fresh_files().items():
        if path.is_file() and path.read_text() == text:
            continue
        stale += 1
        if check:
            sys.stderr.write(f"{path} is not fresh; run: python deploy/grafana/generate.py\n")
        else:
            path.write_text(text)
            sys.stdout.write(f"wrote {path}\n")
    return int(check and stale > 0)


def fresh_files() -> dict[Path, str]:
    """The text that each file should have."""
    files = {Path(__file__).with_name(f"{each.uid}.json"): json_of(each) for each in DASHBOARDS}
    readme = ROOT / "README.md"
    return {**files, ROOT / "docs" / "user" / "dashboards.md": document(), readme: with_overview(readme.read_text())}


def json_of(page: Dashboard) -> str:
    """A dashboard as Grafana takes it."""
    builder = (
        dashboard.Dashboard(page.title)
        .uid(page.uid)
        .description(page.about)
        .tags(["concord"])
        .time("now-1h", "now")
        .refresh("10s")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .with_variable(run_variable())
        .link(
            dashboard.DashboardLink("Concord")
            .type(model.DashboardLinkType.DASHBOARDS)
            .tags(["concord"])
            .include_vars(True)
            .keep_time(True)
        )
    )
    for panel in page.panels:
        builder = builder.with_panel(drawn(panel, panel.layer or page.layer))
    return json.dumps(builder.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def run_variable() -> dashboard.QueryVariable:
    """The run whose series are shown."""
    variable = dashboard.QueryVariable("run").label("run").datasource(SOURCE).query("label_values(concord_step, run)")
    return variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)


def drawn(panel: Panel, layer: int) -> Drawn:
    """One panel with its queries, in the colour of its layer."""
    now = panel.kind in ("stat", "name")
    colour = dashboard.FieldColor().mode(model.FieldColorModeId.FIXED if now else model.FieldColorModeId.SHADES)
    colour = colour.fixed_color(LAYERS[layer].colour)
    builder: Drawn
    if now:
        builder = number(panel).color_scheme(colour).span(WIDTH // 2).height(STAT_HEIGHT)
    elif panel.kind == "heatmap":
        builder = heatmap.Panel().calculate(False).span(WIDTH).height(HEIGHT)
    else:
        legend = (
            shared.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        builder = (
            timeseries.Panel()
            .color_scheme(colour)
            .legend(legend)
            .line_width(1)
            .fill_opacity(0)
            .span(WIDTH)
            .height(HEIGHT)
        )
    builder = builder.title(panel.title).unit(panel.unit).datasource(SOURCE)
    if panel.help:
        builder = builder.description(panel.help)
    for place, (expression, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(of_run(expression)).legend_format(legend).ref_id(chr(ord("A") + place))
        if now:  # over a range, a series that has ended would go on with its last value
            query = query.instant()
        builder = builder.with_target(query.format(PromQueryFormat.HEATMAP) if panel.kind == "heatmap" else query)
    return builder


def number(panel: Panel) -> stat.Panel:
    """Large values, or the names of the series; in words where the panel has them."""
    names = common.BigValueTextMode.NAME if panel.kind == "name" else common.BigValueTextMode.AUTO
    builder = (
        stat.Panel()
        .color_mode(common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .text_mode(names)
    )
    words = {
        str(value): model.ValueMappingResult(text=word, color=colour, index=value)
        for value, (word, colour) in enumerate(panel.words)
    }
    return builder.mappings([model.ValueMap(options=words)] if words else [])


def document() -> str:
    """docs/user/dashboards.md: every panel with its queries."""
    colours = ", ".join(f"{layer.number} {layer.name} `{layer.colour}`" for layer in LAYERS.values())
    parts = [DOCUMENT.format(colours=colours)]
    parts += [
        f"## {page.title}\n\n{page.about} `deploy/grafana/{page.uid}.json`\n\n{table(page)}" for page in DASHBOARDS
    ]
    return "\n".join(parts)


def table(page: Dashboard) -> str:
    """The panels of a dashboard with their queries."""
    rows = ["| panel | layer | queries |", "| --- | --- | --- |"]
    rows += [
        f"| {panel.title} | {panel.layer or page.layer} | "
        f"{'<br>'.join(code(expression) for expression, _ in panel.queries)} |"
        for panel in page.panels
    ]
    return "\n".join(rows) + "\n"


def with_overview(readme: str) -> str:
    """README.md with the first dashboard's panels between its two marks."""
    before, begun, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begun and end):
        raise SystemExit(
            f"README.md lacks {BEGIN!r} or {END!r}, between which the overview's panels stand; put both back on lines "
            "of their own"
        )
    return f"{before}{BEGIN}\n{table(DASHBOARDS[0])}{END}{after}"


def code(expression: str) -> str:
    """A query in a table; `{run="$run"}` is left out, every series has it."""
    return "`" + expression.replace("|", "\\|") + "`"


if __name__ == "__main__":
    sys.exit(main())
