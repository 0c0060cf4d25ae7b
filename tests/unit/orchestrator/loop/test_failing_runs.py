"""A run in which nothing can be trained says why, slows down, and ends by its limits."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.loop.engine_wrap import EngineWrap
from support.loop.loop_case import Case, assert_accounted

from orchestrator.deadlines import StalledError
from orchestrator.dispatch.failures import TooManyFailuresError
from orchestrator.doctor.diagnosis import diagnose
from orchestrator.doctor.findings import Severity
from orchestrator.metrics.causes import Cause
from orchestrator.run_dir.history import How, RunEnd
from orchestrator.run_dir.reader import RunReader
from rollout.types.generation import GenerationRequest, TokenChunk

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
    (ended,) = events_of(case, "run_ended")
    summary = json.loads(case.run.summary.read_text())
    assert summary["ended"] == {"how": "failures", "reason": str(caught.value)}
    assert (ended["how"], ended["reason"], ended["version"]) == ("failures", str(caught.value), 0)
    assert_accounted(summary)
    record, partial = RunReader(case.run.path).read()
    history = record.history
    assert history.end == RunEnd(how=How.FAILURES, reason=str(caught.value))
    assert (history.dispatched, history.over) == (summary["dispatched"], summary["failed"]["reward_raised"])
    assert any(one.startswith("the run ended early (failures): 1") for one in partial)
    primary = diagnose(record).primary
    assert primary is not None
    assert (primary.cause, primary.severity) == (Cause.REWARD_FAILURES, Severity.CRITICAL)
    assert place in primary.summary and f"{history.over} of {history.over} dispatches" in primary.summary
    assert [event["cause"] for event in events_of(case, "diagnosis")] == ["reward_failures"], "said while it ran"


def test_a_run_whose_every_request_is_refused_makes_few_dispatches_and_few_events_while_it_waits(tmp_path: Path):
    """Without pauses it made hundreds of dispatches a second, for as long as it was left alone."""

    class Refusing(EngineWrap):
        def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
            raise ConnectionRefusedError("connection refused")

    case = Case(tmp_path, "deadlines.stall_s=3", wrap=lambda engine, slot: Refusing(engine))
    with pytest.raises(StalledError, match="admission waits for the next attempt"):
        case.drive()
    history = RunReader(case.run.path).read()[0].history
    assert history.end is not None and history.end.how is How.STALLED
    assert history.dispatched <= 9 * 7, "a batch at 0 s and after each pause: 0.1 + 0.2 + 0.4 + 0.8 + 1.6 = 3.1 s"
    assert history.failed == {"engine": history.over} and history.over >= 9 * 3
    assert case.run.events.stat().st_size < 100_000
    causes = [finding.cause for finding in diagnose(RunReader(case.run.path).read()[0]).findings]
    assert causes == [Cause.ENGINE_FAILURES, Cause.NO_STEP]
    assert any(line.startswith("no step for ") for line in case.reporter.said)
