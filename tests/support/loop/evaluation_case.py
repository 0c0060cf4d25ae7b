"""One run over scripted engines with evaluations, in this process, and evaluators that answer as they are told."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.loop.local_fleet import LocalEvaluator, LocalFleet, QuietReporter, inputs_of
from support.loop.run_record import events_of
from support.paths import MODEL

from orchestrator.config import RunConfig, parse_config
from orchestrator.launch.launch import drive
from orchestrator.run_dir.layout import create_run_dir
from orchestrator.signals.observer import NO_SINKS
from rollout.evaluation.evaluator import EvaluationReport
from rollout.types.protocols import Engine
from rollout.types.trajectory import EngineTag
from rollout.types.weights import PolicyVersion
from trainer.step.scripted import ScriptedTrainer

DEADLINE_S = 30.0


class Case:
    """One run of scripted engines with evaluations."""

    def __init__(self, tmp_path: Path, *overrides: str, steps: int = 8) -> None:
        document: dict[str, object] = {
            "run": {"dir": str(tmp_path), "name": "run", "steps": steps, "batch_groups": 3, "group_size": 2},
            "engine": {"type": "scripted"},
            "trainer": {"type": "scripted"},
            "consistency": {"mode": "off"},
            "evaluation": {"every_steps": 3, "prompts": 5},
            "deadlines": {"health_interval_s": 0.02},
        }
        self.config: RunConfig = parse_config(document, "test", overrides)
        self.run = create_run_dir(self.config, "run")
        self.reporter = QuietReporter()
        self.sinks = NO_SINKS
        self.evaluators: list[LocalEvaluator] = []

    def drive(self, change: Callable[[LocalFleet], None] = lambda fleet: None) -> dict[str, Any]:
        async def main() -> dict[str, Any]:
            fleet = LocalFleet(self.config, self.run.path, MODEL, ScriptedTrainer(self.config.trainer))
            self.evaluators = fleet.evaluators
            change(fleet)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    return await drive(
                        self.config, self.run, inputs_of(self.config, MODEL), fleet, self.reporter, sinks=self.sinks
                    )
            finally:
                await fleet.close()

        return asyncio.run(main())

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in events_of(self.run.path) if event["kind"] == kind]


class FakeEvaluator:
    """Answers with a score a call, or raises what stands in its place; it asks no engine."""

    def __init__(self, answers: list[EvaluationReport | Exception]) -> None:
        self._answers = answers

    def connect(self, slot: int, engine: Engine, tag: EngineTag) -> None:
        return None

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def report(
    score: float | None = 0.5,
    parts: tuple[tuple[str, str], ...] = (("sampling", "greedy"),),
    versions: tuple[int, ...] = (0,),
) -> EvaluationReport:
    return EvaluationReport(
        score=score,
        stderr=0.1,
        prompts=5,
        failed=0,
        failure="",
        length_mean=3.0,
        tokens=15,
        policies=tuple(PolicyVersion(1, version) for version in versions),
        parts=parts,
        fingerprint=str(hash(parts)),
        seconds=0.1,
    )
