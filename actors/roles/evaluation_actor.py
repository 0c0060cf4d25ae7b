"""The evaluation in an actor of its own, and its port for the driver."""

from functools import partial
from typing import Any

import ray

from actors.calls import call, kill
from actors.places import Place, here
from actors.ports import EnginePort
from actors.process import enter_process
from actors.roles.engine_actor import RayEnginePort, RemoteEngine
from actors.spec import FleetSpec
from rollout.errors import ConcordError
from rollout.evaluation.evaluator import EvaluationReport, build_evaluator
from rollout.faults.evaluations import plant_evaluator
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.trajectory import EngineTag
from rollout.types.weights import PolicyVersion

NAME = "the evaluation"


@ray.remote
class EvaluationActor:
    """Serves one evaluator on its event loop."""

    def __init__(self, spec: FleetSpec) -> None:
        enter_process("evaluation", spec.run_dir)
        build = partial(
            build_evaluator,
            config=spec.evaluation,
            environment=spec.environment,
            reward=spec.reward,
            sampling=spec.sampling,
            seed=spec.seed,
            max_context=spec.max_context,
        )
        self._evaluator = plant_evaluator(
            lambda tokenizer: build(tokenizer=tokenizer), load_tokenizer(spec.model_dir), spec.faults
        )

    async def place(self) -> Place:
        return here()

    async def connect(self, slot: int, engine: Any, tag: EngineTag) -> None:
        self._evaluator.connect(slot, RemoteEngine(engine, slot), tag)

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        return await self._evaluator.evaluate(slot, policy, label)


class RayEvaluator:
    """Implements `actors.ports.EvaluatorPort` for one incarnation."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def connect(self, slot: int, engine: EnginePort, tag: EngineTag) -> None:
        if not isinstance(engine, RayEnginePort):
            raise ConcordError(
                f"{NAME} got an engine port of type {type(engine).__name__}; expected one of this Ray cluster"
            )
        await call(self.handle.connect.remote(slot, engine.handle, tag), NAME)

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        return await call(self.handle.evaluate.remote(slot, policy, label), NAME)

    async def kill(self) -> None:
        kill(self.handle)
