"""A run that cannot train is never "nothing found": it ends by itself, says why on its way, and the doctor names it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.loop.concord_process import START_S, STEP_S, ConcordProcess, write_config
from support.loop.run_record import assert_counts_add_up, summary_of

Start = Callable[..., ConcordProcess]
pytestmark = pytest.mark.timeout(3 * (START_S + STEP_S))
REWARD = """
def reward(prompt, completion, trajectory):
    return {}["score"]
"""


def test_a_reward_that_raises_on_every_sample_ends_the_run_by_its_limit_with_its_line_and_a_report(
    concord: Start, tmp_path: Path
):
    config, run, module = write_config(tmp_path), tmp_path / "runs" / "run", tmp_path / "mine"
    module.mkdir()
    (module / "graded.py").write_text(REWARD)
    settings = ("reward.type=python", "reward.function=graded:reward", "episodes.max_failures_in_a_row=12")
    process = concord(
        "run",
        config,
        *(part for setting in settings for part in ("--set", setting)),
        environment={"PYTHONPATH": str(module)},
    )
    process.until_said("groups fail")
    assert process.exit_status() == 1, process.errors
    place = f"{module}/graded.py:3 in reward"
    assert "(episodes.max_failures_in_a_row is 12)" in process.errors
    assert "KeyError: 'score'" in process.errors and place in process.errors
    said = [line["event"] for line in process.lines if "groups fail" in line.get("event", "")]
    assert said and place in said[0]
    summary = summary_of(run)
    assert (summary["ended"]["how"], summary["version"], set(summary["failed"])) == ("failures", 0, {"reward_raised"})
    assert_counts_add_up(summary)
    doctor = concord("doctor", run, "--json")
    assert doctor.exit_status() == 0, doctor.errors
    (found,) = doctor.lines
    assert (found["primary"], found["severity"]) == ("reward_failures", "critical")
    assert place in found["findings"][0]["summary"]
    assert place in (run / "report.html").read_text()
