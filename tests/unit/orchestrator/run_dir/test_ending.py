"""How a run stands, read from its directory: it goes on, it ended and why, or its driver is gone."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from orchestrator.run_dir.ending import SILENCE_S, EndRecorded, gone, read_end
from orchestrator.run_dir.history import How, RunEnd
from orchestrator.run_dir.layout import RunDir
from rollout.errors import DeadlineError


def driven_by(run: RunDir, pid: int, host: str, started_s: float) -> None:
    run.driver.write_text(json.dumps({"pid": pid, "host": host, "started_s": started_s}))


def test_whatever_ends_a_run_its_summary_says_how_and_its_driver_is_known(tmp_path: Path):
    run = RunDir(tmp_path)
    run.summary.write_text('{"version": 9}')

    def drive() -> None:
        with EndRecorded(run, lambda error: How.ERROR):
            assert not run.summary.exists(), "of the run before"
            assert gone(run, 0.0, 600.0) == "", "it lives"
            raise DeadlineError("waited 5 s for the trainer\nstacks without end")

    with pytest.raises(DeadlineError):
        drive()
    assert read_end(run, 100) == (RunEnd(how=How.ERROR, reason="waited 5 s for the trainer"), 0)


def test_a_summary_that_was_written_in_order_is_kept(tmp_path: Path):
    run = RunDir(tmp_path)

    def drive() -> None:
        with EndRecorded(run, lambda error: How.ERROR):
            run.summary.write_text('{"version": 9, "ended": {"how": "stopped", "reason": ""}}')
            raise DeadlineError("closing took too long")

    with pytest.raises(DeadlineError):
        drive()
    assert read_end(run, 100) == (RunEnd(how=How.STOPPED), 9)


@pytest.mark.parametrize(("version", "how"), [(9, How.STOPPED), (100, How.FINISHED)])
def test_a_summary_that_does_not_say_how_is_judged_by_its_steps(tmp_path: Path, version: int, how: How):
    RunDir(tmp_path).summary.write_text(json.dumps({"version": version}))
    assert read_end(RunDir(tmp_path), 100) == (RunEnd(how=how), version)


def test_a_driver_of_this_machine_that_does_not_run_is_gone_at_once(tmp_path: Path):
    run = RunDir(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        driven_by(run, process.pid, socket.gethostname(), psutil.Process(process.pid).create_time())
        assert gone(run, 0.0, 600.0) == ""
        process.kill()
        process.wait()
        assert f"process {process.pid}" in gone(run, 0.0, 600.0)


def test_another_process_with_the_drivers_number_is_not_the_driver(tmp_path: Path):
    run, process = RunDir(tmp_path), psutil.Process(os.getppid())
    driven_by(run, process.pid, socket.gethostname(), process.create_time() - 3600)
    assert "does not run any more" in gone(run, 0.0, 600.0)


def test_a_driver_of_another_machine_is_gone_after_longer_silence_than_it_would_keep(tmp_path: Path):
    run = RunDir(tmp_path)
    driven_by(run, 1, "elsewhere", 0.0)
    assert gone(run, 1000.0, 600.0, clock=lambda: 1600.0 + SILENCE_S) == ""
    assert "process 1 of elsewhere" in gone(run, 1000.0, 600.0, clock=lambda: 1601.0 + SILENCE_S)


def test_without_a_word_of_its_driver_nothing_is_said_of_a_run(tmp_path: Path):
    assert gone(RunDir(tmp_path), 1000.0, 600.0) == ""
