"""Prometheus itself parses every query of every dashboard."""

import json
import shutil
import subprocess
from pathlib import Path

import yaml

from orchestrator.dashboards import DASHBOARDS


def test_prometheus_parses_every_query_of_the_dashboards(tmp_path: Path):
    program = shutil.which("promtool")
    assert program is not None, "promtool is not installed: make setup brings it where you are root (Debian: apt-get install prometheus)"
    queries = [
        target["expr"].replace("$__rate_interval", "1m").replace("$run", "a run")
        for file in sorted(DASHBOARDS.glob("concord-*.json"))
        for panel in json.loads(file.read_text())["panels"]
        for target in panel["targets"]
    ]
    assert len(queries) > 80
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run([program, "check", "rules", "--lint=none", path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
