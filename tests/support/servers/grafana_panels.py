"""The queries of the dashboards as Prometheus can be asked them: for one run, and with recorded series written out."""

import json
import re

from support.servers.prometheus_rules import rules

from orchestrator.commands.dashboards_push import DASHBOARDS

RECORDED = re.compile(r'(concord:[a-z0-9_:]+)\{run="[^"]*"\}')


def panel_queries(run: str) -> list[str]:
    """Of every panel of every dashboard, each once."""
    expressions = {rule["record"]: rule["expr"] for rule in rules("recording")}
    asked = [
        target["expr"].replace("$__rate_interval", "1m").replace("$run", run)
        for file in sorted(DASHBOARDS.glob("concord-*.json"))
        for panel in json.loads(file.read_text())["panels"]
        for target in panel["targets"]
    ]
    return list(dict.fromkeys(RECORDED.sub(lambda found: f"({expressions[found[1]]})", query) for query in asked))
