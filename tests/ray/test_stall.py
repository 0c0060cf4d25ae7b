"""A run that no longer moves ends with what every process was doing, those that are busy included."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.loop.concord_process import START_S, STEP_S, ConcordProcess, write_config

Start = Callable[..., ConcordProcess]


@pytest.mark.timeout(2 * (START_S + STEP_S))
def test_a_stalled_run_shows_the_stacks_of_every_actor(concord: Start, tmp_path: Path):
    """The trainer is in the middle of a step that takes an hour."""
    settings = ("trainer.scripted_step_s=3600", "deadlines.stall_s=8")
    process = concord("run", write_config(tmp_path), *(part for setting in settings for part in ("--set", setting)))
    assert process.exit_status() == 1
    assert "no step finished for deadlines.stall_s = 8 s" in process.errors
    stacks = {part.partition("\n")[0]: part for part in process.errors.split("\n== ")[1:]}
    assert stacks.keys() >= {"store", "trainer-0", "engine-0", "episodes-0", "reward-0"}
    assert "trainer/step/scripted.py" in stacks["trainer-0"]
    assert not [name for name, text in stacks.items() if "no stacks" in text]
