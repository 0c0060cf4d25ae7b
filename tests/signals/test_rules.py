"""Prometheus' own tool runs the tests of the rules, and finds one that is wrong."""

import shutil
import subprocess
from pathlib import Path

import pytest
from support.servers.prometheus_rules import FOLDER

pytestmark = pytest.mark.timeout(330)
FILES = sorted((FOLDER / "tests").glob("*.yml"))


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    assert program is not None, (
        "promtool is not installed: make setup brings it where you are root (Debian: apt-get install prometheus)"
    )
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300, check=False)


def test_the_server_takes_config_and_rules():
    done = promtool("check", "config", FOLDER / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_rules_fire_and_keep_quiet_as_written(file: Path):
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rule_with_another_threshold_fails_its_test(tmp_path: Path):
    shutil.copytree(FOLDER, tmp_path / "prometheus")
    rules = tmp_path / "prometheus" / "rules" / "alerts.yml"
    changed = rules.read_text().replace(
        "avg_over_time(concord_zero_variance_groups_ratio[10m]) > 0.8",
        "avg_over_time(concord_zero_variance_groups_ratio[10m]) > 0.95",
    )
    assert changed != rules.read_text()
    rules.write_text(changed)
    done = promtool("test", "rules", tmp_path / "prometheus" / "tests" / "layer1.yml")
    assert done.returncode == 1
    assert "ConcordZeroVarianceGroups" in done.stdout + done.stderr
