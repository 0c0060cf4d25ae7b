"""Writes the dashboards as Grafana takes them, docs/user/dashboards.md, and the overview's panels in README.md, from
`panels.py`.

python deploy/grafana/generate.py            write them
python deploy/grafana/generate.py --check    say which are not fresh; exit status 1 if any
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the checkout, whether or not it is installed

from drawing import json_of, json_of_runbook  # noqa: E402
from machines import FLEET, SYSTEM  # noqa: E402
from panels import DATA, NUMERICAL, OVERVIEW, POLICY  # noqa: E402
from runbook import UID  # noqa: E402
from shape import Dashboard  # noqa: E402

from orchestrator.metrics.layers import LAYERS  # noqa: E402

DASHBOARDS = (OVERVIEW, DATA, POLICY, NUMERICAL, SYSTEM, FLEET)
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
nothing. TOKEN is of a service account with the role Admin (data sources need it).

How to read them:

1. **Is it healthy?** stands at the top of the overview: the worst alert that fires. Beside it, **why not**: the alerts
   and the doctor's first finding, each a link to its section of the runbook, which is a dashboard too (*Concord:
   runbook*), so the links work wherever Grafana runs.
2. Each of the four layers of the overview links to its page; a panel on whose numbers an alert rests draws the alert's
   threshold as a dashed line, and links to what to do.
3. Vertical marks are events, read from Prometheus: alerts, starts and resumes, replaced actors, skipped steps, located
   gradients, changed evaluations; evaluations when switched on at the top.
4. At the top: the Prometheus that is asked, the run (every run of the last 30 days, the newest first, whether or not it
   goes on; move the time to where it was), replicas and blocks. Every panel is of that choice: each series has
   `{{run="$run"}}`, which the tables leave out.
5. Rows that need something switched on (an evaluation, probes, a mixture of experts, a clip by block) say so and are
   folded; so are those for vLLM's own metrics, Ray and GPUs ([what they need](deploy.md#prometheus-and-grafana)).

Units and meanings are those of the catalogue. A panel with one line has the colour of its layer of diagnosis, the same
as in the [report](report.md): {colours}; many lines have colours of their own, by name.

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
    here = Path(__file__)
    files = {here.with_name(f"{each.uid}.json"): json_of(each) for each in DASHBOARDS}
    files[here.with_name(f"{UID}.json")] = json_of_runbook()
    readme = ROOT / "README.md"
    return {**files, ROOT / "docs" / "user" / "dashboards.md": document(), readme: with_overview(readme.read_text())}


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
