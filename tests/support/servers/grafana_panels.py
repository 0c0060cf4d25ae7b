"""The dashboards as they are pushed: their panels, and their queries as Prometheus can be asked them, for one run and
with recorded series written out."""

import json
import re
from pathlib import Path
from typing import Any

from support.servers.prometheus_rules import rules

from orchestrator.commands.dashboards_push import DASHBOARDS

RECORDED = re.compile(r'(concord:[a-z0-9_:]+)\{run="[^"]*"\}')
CONCORD = re.compile(r"\bconcord[_:]")


def dashboard_files() -> list[Path]:
    """All of them."""
    return sorted(DASHBOARDS.glob("concord-*.json"))


def panels_of(file: Path, *, folded: bool = True) -> list[dict[str, Any]]:
    """The panels of a dashboard, with or without those of folded rows, and without the rows themselves."""
    found: list[dict[str, Any]] = []
    for panel in json.loads(file.read_text())["panels"]:
        if panel["type"] != "row":
            found.append(panel)
        elif folded:
            found += panel["panels"]
    return found


def panel_queries(run: str) -> list[str]:
    """Of every panel that shows Concord's own series, each once; what engines, Ray and GPUs measure themselves is not
    there."""
    asked = [query for file in dashboard_files() for panel in panels_of(file) for query in queries_of(panel, run)]
    return list(dict.fromkeys(asked))


def may_be_empty(panel: dict[str, Any]) -> bool:
    """It has words for the case that its query finds nothing."""
    return bool(panel.get("fieldConfig", {}).get("defaults", {}).get("noValue"))


def queries_of(panel: dict[str, Any], run: str) -> list[str]:
    """What one panel asks of Concord's own series."""
    expressions = {rule["record"]: rule["expr"] for rule in rules("recording")}
    asked = [target["expr"] for target in panel.get("targets", ()) if CONCORD.search(target["expr"])]
    for variable, value in (("$__rate_interval", "1m"), ("$run", run), ("$replica", ".*"), ("$block", ".*")):
        asked = [query.replace(variable, value) for query in asked]
    return [RECORDED.sub(lambda found: f"({expressions[found[1]]})", query) for query in asked]
