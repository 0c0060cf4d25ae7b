"""A run sees its own steps from outside the trainer: nothing while they are sound, and the mistake by its code from the
step on that has it."""

from pathlib import Path

from support.loop.local_run import drive_to_its_end

from benchmarks.harness.rehearsal_cases import CASES, document, model_of, read_events
from orchestrator.config import parse_config

START = 3


def test_a_shifted_loss_mask_is_found_from_its_first_step_on_and_nothing_before(tmp_path: Path):
    given = document(CASES["healthy"], 0, model_of(CASES["healthy"], 0, tmp_path / "models"), tmp_path)
    given["faults"] = {"plant": [{"type": "shifted_loss_mask", "start_version": START}]}
    given["run"]["steps"] = START + 2
    given["consistency"] = {"mode": "audit"}
    drive_to_its_end(parse_config({**given}, "steps"))
    events = [e for e in read_events(tmp_path / "run") if e["kind"] in ("trainer_disagrees", "update_differs")]
    assert events and {event["kind"] for event in events} == {"trainer_disagrees"}
    assert min(event["step"] for event in events) == START
    assert all("loss_positions" in event["codes"] for event in events)
