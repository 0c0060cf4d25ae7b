"""Dashboards are generated, fresh, and ask only for what is declared or recorded."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from contracts.source_tree import ROOT

from orchestrator.metrics.catalogue import DECLARED
from orchestrator.metrics.layers import LAYERS
from orchestrator.metrics.types import MetricType

FOLDER = ROOT / "deploy" / "grafana"
FILES = sorted(FOLDER.glob("*.json"))
SERIES = re.compile(r"\b(concord_[a-z0-9_]+|concord:[a-z0-9_:]+)\{([^}]*)\}")
LABEL = re.compile(r"(\w+)\s*[=!]~?")


def panels(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["panels"]


def expressions(file: Path) -> list[str]:
    return [target["expr"] for panel in panels(file) for target in panel["targets"]]


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
    for name in ("deploy/grafana", "orchestrator", "docs", "rollout", "trainer", "actors"):
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
    for panel in json.loads((FOLDER / "concord-overview.json").read_text())["panels"]:
        row = next(line for line in readme.splitlines() if line.startswith(f"| {panel['title']} |"))
        assert row.count("`") == 2 * len(panel["targets"])


def test_there_is_a_page_for_each_layer_and_the_others():
    assert {file.stem for file in FILES} == {
        "concord-overview",
        "concord-fleet",
        "concord-gradloc",
        *(f"concord-layer-{number}" for number in LAYERS),
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_panels_ask_only_for_what_is_declared_or_recorded_and_of_the_chosen_run(file: Path):
    for expression in expressions(file):
        found = SERIES.findall(expression)
        assert len(found) == len(re.findall(r"\bconcord[_:]", expression)) > 0, expression
        assert all('run="$run"' in selector for _, selector in found), expression
        assert not [wrong for name, selector in found if (wrong := complaint(name, set(LABEL.findall(selector))))]


@pytest.mark.parametrize(
    "name",
    ["concord_brilliance", "concord:brilliance:max", "concord_reward_mean_bucket", "concord_token_staleness_steps"],
)
def test_a_name_that_is_not_declared_is_found(name: str):
    assert complaint(name, set())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_legend_names_labels_of_its_metric(file: Path):
    for panel in panels(file):
        for target in panel["targets"]:
            asked = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            known = {
                label
                for name, _ in SERIES.findall(target["expr"])
                if name in DECLARED or name.removesuffix("_bucket") in DECLARED
                for label in (DECLARED.get(name) or DECLARED[name.removesuffix("_bucket")]).label_names
            }
            assert asked <= known | {"le", "phase", "run"}, target


def test_colours_are_those_of_the_layers():
    colours = {
        panel["fieldConfig"]["defaults"]["color"]["fixedColor"]
        for file in FILES
        for panel in panels(file)
        if panel["type"] != "heatmap"
    }
    assert colours == {layer.colour for layer in LAYERS.values()}
