"""Whatever a user's reward does in its worker, it is counted under its reason, and the run goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.loop.concord_process import START_S, STEP_S, ConcordProcess, write_config
from support.loop.run_record import assert_counts_add_up, assert_record, events_of, summary_of

Start = Callable[..., ConcordProcess]
pytestmark = pytest.mark.timeout(2 * (START_S + STEP_S))
REWARD = '''
import os, pathlib, signal, time

FAULTS = {
    "hang": lambda: time.sleep(3600),
    "raise": lambda: 1 / 0,
    "nan": lambda: float("nan"),
    "string": lambda: "0.5",
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
}

def reward(prompt, completion, trajectory):
    """Each fault once in the life of the run, then always 0.25."""
    for name, fault in FAULTS.items():
        try:
            (pathlib.Path(__file__).parent / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        return fault()
    return 0.25
'''


def test_a_reward_that_hangs_raises_dies_or_gives_no_number_is_counted_and_the_run_goes_on(
    concord: Start, tmp_path: Path
):
    config, run, module = write_config(tmp_path), tmp_path / "runs" / "run", tmp_path / "mine"
    module.mkdir()
    (module / "graded.py").write_text(REWARD)
    settings = ("reward.type=python", "reward.function=graded:reward", "reward_workers.deadline_s=8")
    process = concord(
        "run",
        config,
        *(part for setting in settings for part in ("--set", setting)),
        environment={"PYTHONPATH": str(module)},
    )
    assert process.exit_status() == 0, process.errors
    summary = summary_of(run)
    assert summary["failed"] == {"reward_invalid": 2, "reward_raised": 1, "reward_timeout": 1, "reward_worker_died": 1}
    assert summary["reward_first"] == summary["reward_last"] == 0.25
    assert_counts_add_up(summary)
    assert_record(run, steps=12, batch_groups=3, max_staleness=2)
    details = {event["reason"]: event["detail"] for event in events_of(run) if event["kind"] == "failed"}
    assert "ZeroDivisionError: division by zero" in details["reward_raised"]
    assert "longer than reward_workers.deadline_s = 8" in details["reward_timeout"]


def test_a_reward_module_that_cannot_be_imported_ends_the_run_with_its_name_and_the_cure(
    concord: Start, tmp_path: Path
):
    process = concord(
        "run", write_config(tmp_path), "--set", "reward.type=python", "--set", "reward.function=nowhere:reward"
    )
    assert process.exit_status() == 2, process.errors
    assert "cannot import 'nowhere'" in process.errors
    assert "PYTHONPATH" in process.errors
    assert "Traceback" not in process.errors
    assert process.left_of_it() == []
