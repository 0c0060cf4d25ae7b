"""The benchmarks of the gradient search run, and in a small form they find what they plant."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

from benchmarks.harness.layerclip_figure import drawn, table

pytestmark = pytest.mark.timeout(300)


def answer(tmp_path: Path, *command: str) -> dict[str, Any]:
    out = tmp_path / "answer.json"
    done = subprocess.run(
        [sys.executable, *command, "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


def test_the_gpu_script_finds_its_spike_on_a_small_model(tmp_path: Path):
    found = answer(tmp_path, "benchmarks/gpu_gradloc.py", "--small")
    assert {name: (one["outcome"], one["exact"]) for name, one in found["searches"].items()} == dict.fromkeys(
        found["searches"], ("located", True)
    )
    assert (
        found["searches"]["search"]["passes"]
        == 2
        < found["searches"]["search, no pulls"]["passes"]
        < found["searches"]["search, no record"]["passes"]
    )
    assert found["searches"]["right suspect"]["passes"] == 2


@pytest.mark.slow
def test_a_few_cases_of_every_kind_come_out_right(tmp_path: Path):
    found = answer(tmp_path, "benchmarks/gradloc.py", "--only", "search", "--count", "40")["search"]
    for name, bound in (("savings", 40), ("no pulls", 40), ("published", 8), ("suspect", 8)):
        assert found["single"][f"{name} exact"] == found["single"][f"{name} cases"] >= bound
        assert found["single"][f"{name} passes over the bound, at most"] <= 0
    for name in ("savings", "no pulls"):
        assert found["two"][f"{name} exact"] == found["two"][f"{name} cases"] >= 8
    assert found["healthy"]["located"] == found["diffuse"]["located"] == 0
    assert found["diffuse"]["cases"] >= 8


def test_areas_are_mean_rewards_with_the_intervals_of_their_seeds():
    curves = {"healthy": [[0.0, 1.0], [0.5, 1.0]], "global": [[0.0, 0.5], [0.5, 0.5]]}
    found = table(curves)
    assert found["area"]["healthy"]["mean"] == pytest.approx(0.625)
    assert found["area"]["healthy"]["half_width_95"] == pytest.approx(12.706 * 0.125)
    assert found["area_less_healthy"] == {"global": {"mean": pytest.approx(-0.25), "half_width_95": pytest.approx(0.0)}}
    assert found["curves"] == {"healthy": [0.25, 1.0], "global": [0.25, 0.5]}
    assert drawn(found["curves"], 2).count("<polyline") == 3
