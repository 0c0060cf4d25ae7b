"""Rehearsals in one process: what is planted into a real run is the doctor's primary finding. One seed and models with
random weights; the whole table is `benchmarks/doctor.py`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.loop.local_run import drive_to_its_end

from benchmarks.harness.doctor_cases import CASES, document
from orchestrator.config import parse_config
from orchestrator.doctor.diagnosis import diagnose
from orchestrator.run_dir.reader import RunReader

torch.set_num_threads(1)
SUBSET = ("length_reward", "eval_template_changed", "train_eval_overlap")
"""Those that need no policy that can do anything."""


@pytest.mark.parametrize("name", SUBSET)
def test_what_is_planted_into_a_run_is_its_primary_finding(tmp_path: Path, name: str) -> None:
    case = replace(CASES[name], warm=False)
    made = document(case, 0, tmp_path / "models", tmp_path)
    made["run"] |= {"steps": 30, "batch_groups": 4, "group_size": 4}
    made["evaluation"]["prompts"] = 16
    config = parse_config({**made}, name)
    run = drive_to_its_end(config)
    record, partial = RunReader(run.path).read()
    found = diagnose(record)
    assert partial == ()
    assert found.primary is not None
    assert (found.primary.cause, found.primary.layer) == (case.cause, 1), [
        finding.summary for finding in found.findings
    ]
    last = [event for event in record.of_kind("evaluation") if event.number("version") == config.run.steps]
    assert len(last) == 1, "the last version is scored"
    assert len(last[0].text("weights_digest")) == 64
