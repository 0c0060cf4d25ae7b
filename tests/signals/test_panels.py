"""Prometheus itself parses every query of every dashboard."""

import shutil
import subprocess
from pathlib import Path

import yaml
from support.servers.grafana_panels import panel_queries


def test_prometheus_parses_every_query_of_the_dashboards(tmp_path: Path):
    program = shutil.which("promtool")
    assert program is not None, (
        "promtool is not installed: make setup brings it where you are root (Debian: apt-get install prometheus)"
    )
    queries = panel_queries("a run")
    assert len(queries) > 80
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(
        [program, "check", "rules", "--lint=none", path], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
