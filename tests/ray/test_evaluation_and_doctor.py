"""On real Ray: evaluations run beside training in an actor of their own, a planted reward worker dies, and `concord
doctor` reads what is left."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.loop.concord_process import START_S, STEP_S, ConcordProcess, write_config
from support.loop.run_record import assert_counts_add_up, assert_every_dispatch_ends_once, events_of, summary_of

Start = Callable[..., ConcordProcess]
SETTINGS = (
    "run.steps=8",
    "evaluation.every_steps=4",
    "evaluation.prompts=6",
    'faults.plant=[{type="dead_reward_worker", rate=0.2, start_version=0}]',
)


@pytest.mark.timeout(3 * (START_S + STEP_S))
def test_scores_come_beside_training_and_the_doctor_names_the_planted_worker(concord: Start, tmp_path: Path):
    run = tmp_path / "runs" / "run"
    process = concord("run", write_config(tmp_path), *(part for setting in SETTINGS for part in ("--set", setting)))
    assert process.exit_status() == 0, process.errors
    summary = summary_of(run)
    assert_counts_add_up(summary)
    assert_every_dispatch_ends_once(run)
    assert "evaluation" in summary["peak_rss_mb"]
    scores = [event for event in events_of(run) if event["kind"] == "evaluation"]
    assert (scores[0]["version"], scores[0]["mixed"]) == (0, False)
    assert scores[-1]["version"] == summary["version"]
    assert {event["prompts"] for event in scores} == {6}
    assert len({event["fingerprint"] for event in scores}) == 1
    assert summary["failed"]["reward_worker_died"] >= 3
    doctor = concord("doctor", run, "--json")
    assert doctor.exit_status() == 0, doctor.errors
    found = json.loads("".join(doctor.output))
    assert found["partial"] == []
    assert "reward_worker" in [finding["cause"] for finding in found["findings"]]
    assert process.left_of_it() == []
