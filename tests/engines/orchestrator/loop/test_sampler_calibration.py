"""A run finds out from its tokens alone that a replica does not sample as it says."""

from pathlib import Path
from typing import Any

import pytest
from support.loop.local_run import drive_to_its_end

from benchmarks.harness.rehearsal_cases import CASES, REPLICA, document, model_of, read_events
from orchestrator.config import parse_config

KINDS = ("consistency_finding", "sampler_differs", "samples_repeat")
START = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of(CASES["healthy"], 0, tmp_path_factory.mktemp("models"))


def found(folder: Path, model: Path, *faults: dict[str, Any]) -> list[dict[str, Any]]:
    """What the run says of its replicas, in order."""
    given = document(CASES["healthy"], 0, model, folder)
    given["faults"] = {"plant": [{"replica": REPLICA, "start_version": START, **fault} for fault in faults]}
    given["run"] |= {"steps": START + 5, "batch_groups": 6}
    drive_to_its_end(parse_config({**given}, "calibration"))
    return [event for event in read_events(folder / "run") if event["kind"] in KINDS]


def test_a_temperature_that_is_not_declared_is_found_where_all_log_probs_agree(tmp_path: Path, model: Path):
    events = found(tmp_path, model, {"type": "silent_temperature", "temperature": 0.25}, {"type": "raw_logprobs"})
    assert {event["kind"] for event in events} == {"sampler_differs"}
    assert {event["replica"] for event in events} == {REPLICA}
    assert events[0]["inverse_temperature"] > 1.5
    assert events[0]["z"] < -6


def test_a_constant_seed_is_found(tmp_path: Path, model: Path):
    events = found(tmp_path, model, {"type": "constant_seed"})
    assert {event["kind"] for event in events} == {"samples_repeat"}
    assert {event["replica"] for event in events} == {REPLICA}
    assert events[0]["repeats"] > 10 * events[0]["expected_repeats"]


def test_a_healthy_sampler_is_not_reported(tmp_path: Path, model: Path):
    assert found(tmp_path, model) == []
