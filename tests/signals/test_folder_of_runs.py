"""One pattern in the config of a real Prometheus finds every run of a folder: those that are there, those that come,
and no more those that have ended."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from contracts.source_tree import ROOT
from support.servers.prometheus_server import PrometheusServer

from orchestrator.exporters.prometheus import Exporter
from orchestrator.exporters.prometheus_targets import Targets
from orchestrator.metrics.snapshot import Snapshot
from orchestrator.run_dir.layout import RunDir

CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yml"


def listed(runs: Path, name: str, exporter: Exporter, step: float) -> RunDir:
    run = RunDir(runs / name)
    run.path.mkdir(parents=True)
    exporter.show(Snapshot(numbers={"concord_step": {(): step}}, distributions={}))
    Targets(run.prometheus_targets, name, exporter.target).show({})
    return run


@pytest.mark.timeout(200)
def test_two_runs_on_one_machine_are_found_by_one_pattern(tmp_path: Path):
    runs = tmp_path / "runs"
    with (
        Exporter("127.0.0.1", 0) as first,
        Exporter("127.0.0.1", 0) as second,
        PrometheusServer(tmp_path / "prometheus", [runs / ".prometheus" / "*.json"]) as prometheus,
    ):

        def shows(expression: str, value: float | None) -> None:
            prometheus.wait_until(lambda: prometheus.value(expression) == value, f"{expression} to be {value}")

        listed(runs, "one", first, 1.0)
        shows('concord_step{run="one"}', 1.0)
        ended = listed(runs, "two", second, 2.0)
        shows('concord_step{run="two"}', 2.0)
        shows("count(concord_step)", 2.0)
        ended.prometheus_targets.unlink()
        shows('up{run="two"}', None)
        shows('concord_step{run="two"}', None)
        shows('concord_step{run="one"}', 1.0)
        shows('last_over_time(concord_step{run="two"}[10m])', 2.0)


def test_the_config_of_the_checkout_names_that_pattern():
    program = shutil.which("promtool")
    assert program is not None, "promtool is not installed (Debian: apt-get install prometheus)"
    done = subprocess.run([program, "check", "config", CONFIG], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = {job["job_name"]: job for job in yaml.safe_load(CONFIG.read_text())["scrape_configs"]}
    (pattern,) = jobs["concord"]["file_sd_configs"][0]["files"]
    asked = (CONFIG.parent / pattern).resolve()
    assert asked == RunDir(ROOT / "runs" / "any").prometheus_targets.with_name("*.json")
