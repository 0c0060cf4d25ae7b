"""Evaluations that die, hang, never start or score nothing: the training goes on, and an event says why there is no
score."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.loop.evaluation_case import DEADLINE_S, Case, FakeEvaluator, report
from support.loop.local_fleet import LocalFleet, inputs_of
from support.paths import MODEL

from orchestrator.launch.launch import drive
from rollout.errors import ConcordError, ProcessLostError
from rollout.evaluation.evaluator import EvaluationReport
from rollout.types.protocols import Engine
from rollout.types.trajectory import EngineTag
from rollout.types.weights import PolicyVersion
from trainer.step.scripted import ScriptedTrainer


def test_a_first_evaluation_that_never_answers_holds_updates_back_for_its_deadline_only(tmp_path: Path):
    case = Case(tmp_path, "evaluation.deadline_s=0.2", "evaluation.every_steps=50")
    summary = case.drive(lambda fleet: setattr(fleet, "make_evaluator", lambda: NeverAnswers([report()])))
    assert summary["version"] == 8
    assert "waited 0.2 s for the evaluation of e1-v0" in case.events("evaluation_failed")[0]["reason"]


class NeverAnswers(FakeEvaluator):
    """As it says."""

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


def test_an_evaluation_that_dies_is_told_and_the_next_one_is_taken(tmp_path: Path):
    case = Case(tmp_path, "evaluation.every_steps=1", steps=12)
    answers: list[EvaluationReport | Exception] = [ProcessLostError("the evaluation is gone"), report()]
    summary = case.drive(lambda fleet: setattr(fleet, "make_evaluator", lambda: FakeEvaluator(answers)))
    assert summary["version"] == 12
    assert [event["reason"] for event in case.events("evaluation_failed")] == ["the evaluation is gone"]
    assert case.events("evaluation")
    assert len(case.evaluators) == 2


class Unconnectable(FakeEvaluator):
    """Its process is gone whenever it is told of an engine."""

    def connect(self, slot: int, engine: Engine, tag: EngineTag) -> None:
        raise ProcessLostError("the evaluation is gone")


def cannot_start() -> FakeEvaluator:
    raise ConcordError("the evaluation did not start")


@pytest.mark.parametrize(
    ("make", "reason"),
    [(cannot_start, "the evaluation did not start"), (lambda: Unconnectable([report()]), "the evaluation is gone")],
)
def test_an_evaluation_that_never_starts_ends_no_run_and_is_tried_when_it_is_due(
    tmp_path: Path, make: Callable[[], FakeEvaluator], reason: str
):
    case = Case(tmp_path)
    summary = case.drive(lambda fleet: setattr(fleet, "make_evaluator", make))
    failed = case.events("evaluation_failed")
    assert (summary["version"], summary["replica_restarts"], {event["reason"] for event in failed}) == (8, 0, {reason})
    versions = [event["version"] for event in failed]
    assert versions[0] == 0 and versions[-1] == 8
    assert len(versions) == len(set(versions)) <= 4


class StuckEvaluator(FakeEvaluator):
    """Answers nothing; asks for a stop when the last version's turn has come."""

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__([report()])
        self._stop = stop

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        if policy.version < 2:
            return await super().evaluate(slot, policy, label)
        self._stop()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


def test_a_stop_does_not_wait_for_the_last_score(tmp_path: Path):
    case, ask = Case(tmp_path, "evaluation.every_steps=50", steps=2), list[Callable[[], None]]()

    async def main() -> dict[str, Any]:
        fleet = LocalFleet(case.config, case.run.path, MODEL, ScriptedTrainer(case.config.trainer))
        fleet.make_evaluator = lambda: StuckEvaluator(lambda: ask[0]())
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await drive(
                    case.config, case.run, inputs_of(case.config, MODEL), fleet, case.reporter, ask.append
                )
        finally:
            await fleet.close()

    assert asyncio.run(main())["version"] == 2
    assert [event["reason"] for event in case.events("evaluation_failed")] == ["the run was stopped"]


def test_without_a_finished_prompt_there_is_an_event_and_no_score(tmp_path: Path):
    case = Case(tmp_path)
    case.drive(lambda fleet: setattr(fleet, "make_evaluator", lambda: FakeEvaluator([report(score=None, versions=())])))
    assert case.events("evaluation") == []
    assert "prompts was finished" in case.events("evaluation_failed")[0]["reason"]
