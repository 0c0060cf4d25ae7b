"""Dashboards are generated, fresh, ask only for what is declared or recorded, and say what a stranger on call needs:
units, meanings, thresholds, and where to go next."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from contracts.source_tree import ROOT
from support.servers.grafana_panels import dashboard_files, panels_of
from support.servers.prometheus_rules import rules

from orchestrator.metrics.catalogue import DECLARED
from orchestrator.metrics.causes import Cause
from orchestrator.metrics.layers import LAYERS
from orchestrator.metrics.types import MetricType

FOLDER = ROOT / "deploy" / "grafana"
RUNBOOK = FOLDER / "concord-runbook.json"
FILES = [file for file in dashboard_files() if file != RUNBOOK]
SERIES = re.compile(r"\b(concord_[a-z0-9_]+|concord:[a-z0-9_:]+)\{([^}]*)\}")
FOREIGN = re.compile(r"\b(vllm:[a-z0-9_]+|ray_[a-z_]+|DCGM_[A-Z_]+|ALERTS|up)\b")
LABEL = re.compile(r"(\w+)\s*[=!]~?")
ALERTS = {rule["alert"]: rule for rule in rules("alerts")}
WEEK = "last_over_time(concord_run_info[7d])"
"""The list of runs, the one query that is not of the chosen run."""


def expressions(file: Path) -> list[str]:
    return [target["expr"] for panel in panels_of(file) for target in panel["targets"]]


def recorded() -> set[str]:
    document = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules" / "recording.yml").read_text())
    return {rule["record"] for group in document["groups"] for rule in group["rules"]}


def complaint(name: str, labels: set[str]) -> str:
    """What is wrong with a series that a panel asks for; empty where nothing is."""
    if ":" in name:
        return "" if name in recorded() else f"{name} is not recorded"
    metric = DECLARED.get(name) or DECLARED.get(name.removesuffix("_bucket"))
    if metric is None or (metric.type is MetricType.HISTOGRAM) != name.endswith("_bucket"):
        return f"{name} is not declared, or not as such"
    strange = labels - {"run", "le", *metric.label_names}
    return f"{name} has no label {sorted(strange)}" if strange else ""


def test_files_are_fresh():
    done = subprocess.run(
        [sys.executable, FOLDER / "generate.py", "--check"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_file_that_is_not_fresh_is_found(tmp_path: Path):
    for name in ("deploy", "orchestrator", "docs", "rollout", "trainer", "actors"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    changed = tmp_path / "deploy" / "grafana" / "concord-fleet.json"
    changed.write_text(changed.read_text().replace("replica_up", "replica_down"))
    done = subprocess.run(
        [sys.executable, "-P", tmp_path / "deploy/grafana/generate.py", "--check"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PYTHONPATH": str(tmp_path / "deploy/grafana")},
    )
    assert (done.returncode, "concord-fleet.json is not fresh" in done.stderr) == (1, True), done.stderr


def test_the_first_page_lists_the_overview_with_its_queries():
    readme = (ROOT / "README.md").read_text()
    for panel in panels_of(FOLDER / "concord-overview.json"):
        row = next(line for line in readme.splitlines() if line.startswith(f"| {panel['title']} |"))
        assert row.count("`") == 2 * len(panel["targets"])


def test_there_is_a_page_for_each_layer_and_the_others():
    layers = {f"concord-layer-{number}" for number in LAYERS}
    assert {file.stem for file in dashboard_files()} == {
        "concord-overview",
        "concord-fleet",
        "concord-runbook",
        *layers,
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_panels_ask_only_for_what_is_declared_or_recorded_and_of_the_chosen_run(file: Path):
    for expression in expressions(file):
        if expression == WEEK:
            continue
        found = SERIES.findall(expression)
        assert len(found) == len(re.findall(r"\bconcord[_:]", expression)), expression
        assert found or FOREIGN.search(expression), expression
        assert all('run="$run"' in selector for _, selector in found), expression
        assert not [wrong for name, selector in found if (wrong := complaint(name, set(LABEL.findall(selector))))]
        for label in ("replica", "block"):
            narrows = [label in DECLARED[name].label_names for name, _ in found if name in DECLARED]
            assert not any(narrows) or not chosen(file, label) or f'{label}=~"${label}"' in expression, expression


def chosen(file: Path, variable: str) -> bool:
    return variable in [each["name"] for each in json.loads(file.read_text())["templating"]["list"]]


@pytest.mark.parametrize(
    "name",
    ["concord_brilliance", "concord:brilliance:max", "concord_reward_mean_bucket", "concord_token_staleness_steps"],
)
def test_a_name_that_is_not_declared_is_found(name: str):
    assert complaint(name, set())


def test_what_engines_and_ray_measure_themselves_is_what_their_packages_declare():
    """DCGM's names are NVIDIA's field ids, which no package here knows."""
    asked = {name for file in FILES for expression in expressions(file) for name in FOREIGN.findall(expression)}
    vllm = {re.sub("_(total|bucket)$", "", name) for name in asked if name.startswith("vllm:")}
    assert vllm and not [name for name in vllm if f'"{name}"' not in source_of("vllm", "v1/metrics/*.py")]
    ray = {name for name in asked if name.startswith("ray_")}
    own = source_of("ray", "dashboard/modules/metrics/dashboards/*.py")
    assert ray and not [name for name in ray if not re.search(rf"\b{name}\b", own)]


def source_of(package: str, pattern: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return "".join(path.read_text() for path in Path(spec.submodule_search_locations[0]).glob(pattern))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_legend_names_labels_of_its_metric(file: Path):
    for panel in panels_of(file):
        for target in panel["targets"]:
            asked = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            known = {
                label
                for name, _ in SERIES.findall(target["expr"])
                if name in DECLARED or name.removesuffix("_bucket") in DECLARED
                for label in (DECLARED.get(name) or DECLARED[name.removesuffix("_bucket")]).label_names
            }
            foreign = {"replica", "finished_reason", "alertname", "ip", "Location", "State", "Hostname", "gpu"}
            known |= foreign if FOREIGN.search(target["expr"]) else set()
            assert asked <= known | {"le", "phase", "run"}, target


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_panel_has_a_unit_and_says_what_it_shows(file: Path):
    for panel in panels_of(file):
        assert panel["fieldConfig"]["defaults"]["unit"] not in ("", "none"), panel["title"]
        assert len(panel["description"]) > 20, panel["title"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_line_has_statistics_in_its_legend_and_many_lines_have_colours_of_their_own(file: Path):
    for panel in panels_of(file):
        if panel["type"] == "timeseries":
            assert {"lastNotNull", "mean", "max"} <= set(panel["options"]["legend"]["calcs"]), panel["title"]
            many = len(panel["targets"]) > 1 or "{{" in panel["targets"][0]["legendFormat"]
            mode = panel["fieldConfig"]["defaults"]["color"]["mode"]
            assert mode == ("palette-classic-by-name" if many else "fixed"), panel["title"]


def test_colours_are_those_of_the_layers():
    colours = {
        colour
        for file in FILES
        for panel in panels_of(file)
        if (colour := panel["fieldConfig"]["defaults"].get("color", {}).get("fixedColor"))
    }
    assert colours == {layer.colour for layer in LAYERS.values()}


def linked_panels(panel: dict[str, Any]) -> list[int]:
    addresses = [link["url"] for link in panel.get("links") or ()]
    for override in panel["fieldConfig"]["overrides"]:
        addresses += [link["url"] for each in override["properties"] if each["id"] == "links" for link in each["value"]]
    return [
        int(found[1]) for address in addresses if (found := re.match(r"/d/concord-runbook\?viewPanel=(\d+)", address))
    ]


def test_every_alert_and_every_finding_links_to_its_section_of_the_runbook():
    sections = {panel["id"]: panel["title"] for panel in panels_of(RUNBOOK)}
    assert set(sections.values()) == {*ALERTS, *map(str, Cause)}
    tiles = [panel for panel in panels_of(FOLDER / "concord-overview.json") if panel["title"].startswith("Why not")]
    assert len(tiles) == 2
    for panel in tiles:
        overrides = panel["fieldConfig"]["overrides"]
        named = [each["matcher"]["options"] for each in overrides]
        assert [sections[number] for number in linked_panels(panel)] == named == [*ALERTS, *map(str, Cause)]


def test_an_alert_with_a_number_is_a_threshold_on_a_panel_that_links_to_what_to_do():
    sections = {panel["title"]: panel["id"] for panel in panels_of(RUNBOOK)}
    panels = [panel for file in FILES for panel in panels_of(file) if not panel["title"].startswith("Why not")]
    linked = Counter(number for panel in panels for number in linked_panels(panel))
    assert not [name for name in ALERTS if not linked[sections[name]]]
    plain = re.compile(
        r"^\((?:\w+_over_time\()?(concord[_:]\w[\w:]*)(?:\[\w+\]\))? [><] ([\d.]*[1-9][\d.]*)\)?(?! \*) "
    )
    checked = 0
    for name, rule in ALERTS.items():
        if found := plain.match(rule["expr"]):
            checked += 1
            assert [
                step
                for panel in panels
                if sections[name] in linked_panels(panel)
                for step in panel["fieldConfig"]["defaults"].get("thresholds", {"steps": []})["steps"]
                if step["value"] == float(found[2])
            ], name
    assert checked >= 20


def test_every_page_can_be_narrowed_has_marks_and_leads_to_the_others():
    for file in dashboard_files():
        page = json.loads(file.read_text())
        names = [each["name"] for each in page["templating"]["list"]]
        assert names[:2] == ["datasource", "run"]
        runs = page["templating"]["list"][1]["query"]
        assert "last_over_time" in runs and "30d" in runs, "runs of yesterday are there too"
        assert len(page["annotations"]["list"]) >= 6
        assert all(mark["expr"] and 'run="$run"' in mark["expr"] for mark in page["annotations"]["list"])
        assert page["links"][0]["tags"] == ["concord"]
        for panel in panels_of(file):
            assert panel.get("datasource", {}).get("uid") in (None, "${datasource}"), "no fixed data source"
    assert chosen(FOLDER / "concord-layer-3.json", "block")
    assert chosen(FOLDER / "concord-fleet.json", "replica")


def test_the_overview_leads_to_every_layer():
    addresses = {
        link["url"].partition("?")[0]
        for panel in panels_of(FOLDER / "concord-overview.json")
        for link in panel.get("links") or ()
    }
    assert {f"/d/concord-layer-{number}" for number in LAYERS} <= addresses


def test_nothing_is_drawn_twice_but_on_the_overview():
    drawn = Counter(
        target["expr"]
        for file in FILES
        if file.stem != "concord-overview"
        for panel in panels_of(file)
        for target in panel["targets"]
        if panel["type"] == "timeseries"
    )
    assert not [expression for expression, times in drawn.items() if times > 1]


@pytest.mark.parametrize("file", dashboard_files(), ids=lambda file: file.stem)
def test_panels_have_ids_of_their_own_and_do_not_lie_over_each_other(file: Path):
    top = json.loads(file.read_text())["panels"]
    ids = [panel["id"] for panel in panels_of(file)] + [panel["id"] for panel in top if panel["type"] == "row"]
    assert len(set(ids)) == len(ids)
    cells = Counter(
        (x, y)
        for panel in top
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    )
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) <= 23
