"""Ctrl-C and SIGTERM in the middle of a run, and a checkpoint that cannot be written: the run ends in order, and a
resume finishes it."""

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from support.loop.concord_process import ENDLESS, START_S, STEP_S, ConcordProcess, write_config
from support.loop.run_record import assert_counts_add_up, assert_record, events_of, kinds_of, summary_of

Start = Callable[..., ConcordProcess]


def stopped_by(process: ConcordProcess, number: signal.Signals, run: Path) -> int:
    """Send the signal; the step at which the run has stopped, which must have a checkpoint."""
    targets = run.parent / ".prometheus" / f"{run.name}.json"
    assert targets.is_file()
    process.signal(number)
    assert process.exit_status(STEP_S) == 0, process.errors
    assert process.left_of_it() == []
    assert not targets.exists()
    summary = summary_of(run)
    version, epoch = summary["version"], summary["trainer_epoch"]
    assert version == process.steps[-1]
    assert (run / "checkpoints" / f"e{epoch}-v{version}" / "state.json").is_file()
    assert any(
        f"stopped at step {version} of" in line.get("event", "") and f"concord resume {run}" in line["event"]
        for line in process.lines
    )
    assert_counts_add_up(summary)
    return version


@pytest.mark.timeout(9 * (START_S + STEP_S))
def test_a_run_that_is_stopped_by_signals_is_checkpointed_and_can_be_finished(concord: Start, tmp_path: Path):
    """Before: episodes that are cancelled at their deadline disturb nobody, and a checkpoint that cannot be written
    ends the run with its name."""
    config, run = write_config(tmp_path), tmp_path / "runs" / "run"
    settings = (ENDLESS, "engine.latency_sigma=2", "episodes.deadline_s=1")
    first = concord("run", config, *(part for setting in settings for part in ("--set", setting)))
    first.until_step(1)
    first.until(
        lambda: any(event.get("reason") == "deadline" for event in events_of(run)), "an episode to pass its deadline"
    )
    first.until_step(max(4, first.steps[-1] + 1))
    obstacles = [
        run / "checkpoints" / f".partial-e1-v{step}" for step in range(first.steps[-1] + 1, first.steps[-1] + 1001)
    ]
    for path in obstacles:
        with suppress(FileExistsError):  # that checkpoint is being written now
            path.touch(exist_ok=False)
    assert first.exit_status(STEP_S) == 2, first.errors
    assert f"cannot write {run / 'checkpoints'}" in first.errors
    assert first.left_of_it() == []
    for path in obstacles:
        if path.is_file():
            path.unlink()

    second = concord("resume", run, "--set", "engine.latency_sigma=0.8")
    second.until_step(3)
    assert second.steps[0] % 4 == 1
    at_term = stopped_by(second, signal.SIGTERM, run)

    third = concord("resume", run)
    third.until_step(at_term + 2)
    assert third.steps[0] == at_term + 1
    at_interrupt = stopped_by(third, signal.SIGINT, run)

    last = concord("resume", run, "--set", f"run.steps={at_interrupt + 4}")
    assert last.exit_status() == 0, last.errors
    assert last.steps == list(range(at_interrupt + 1, at_interrupt + 5))
    assert kinds_of(run)["epoch_opened"] == 4
    assert_counts_add_up(summary_of(run))
    assert_record(run, steps=at_interrupt + 4, batch_groups=3, max_staleness=2)
