"""A run in which nothing can be trained says why, slows down, and ends by its limits."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.loop.loop_case import Case

from orchestrator.dispatch.failures import TooManyFailuresError

RAISING = """
def reward(prompt, completion, trajectory):
    return float("no number")
"""


@pytest.fixture
def raising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Settings of a reward that raises on every sample."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "raising_reward.py").write_text(RAISING)
    monkeypatch.syspath_prepend(tmp_path / "mine")
    return ("reward.type=python", "reward.function=raising_reward:reward")


def events_of(case: Case, *kinds: str) -> list[dict[str, Any]]:
    lines = case.run.events.read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["kind"] in kinds]


def test_a_reward_that_raises_on_every_sample_ends_the_run_with_the_line_that_raises(
    tmp_path: Path, raising: tuple[str, ...]
):
    case = Case(tmp_path, *raising, "episodes.max_failures_in_a_row=12")
    with pytest.raises(TooManyFailuresError) as caught:
        case.drive()
    place = f"{tmp_path}/mine/raising_reward.py:3 in reward"
    assert "could not convert string to float" in str(caught.value) and place in str(caught.value)
    assert any(place in line for line in case.reporter.said)
    failing = events_of(case, "groups_failing")
    assert failing and failing[-1]["place"] == place
    assert len(events_of(case, "failed")) == failing[-1]["failed"] >= 12
