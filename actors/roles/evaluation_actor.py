"""The evaluation in an actor of its own, and its port for the driver."""

from functools import partial
from typing import Any

import ray

from actors.calls import call
from actors.places import Place, here
from actors.process import enter_process
from actors.roles.engine_actor import RayEngineUser, RemoteEngine
from actors.spec import FleetSpec
from rollout.evaluation.evaluator import EvaluationReport, build_evaluator
from rollout.faults.evaluations import plant_evaluator
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.trajectory import EngineTag
from rollout.types.weights import PolicyVersion


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
        tokenizer = load_tokenizer(spec.model_dir)
        self._evaluator = plant_evaluator(lambda tokenizer: build(tokenizer=tokenizer), tokenizer, spec.faults)

    async def place(self) -> Place:
        return here()

    async def connect(self, slot: int, engine: Any, tag: EngineTag) -> None:
        self._evaluator.connect(slot, RemoteEngine(engine, slot), tag)

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        return await self._evaluator.evaluate(slot, policy, label)


class RayEvaluator(RayEngineUser):
    """Implements `actors.ports.EvaluatorPort` for one incarnation."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle, "the evaluation")

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        return await call(self.handle.evaluate.remote(slot, policy, label), self.name)
