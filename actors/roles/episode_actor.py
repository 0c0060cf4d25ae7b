"""An episode worker in an actor of its own, and its port for the driver."""

from collections.abc import Sequence
from typing import Any

import ray

from actors.calls import call
from actors.places import Place, here
from actors.process import enter_process
from actors.roles.engine_actor import RayEngineUser, RemoteEngine
from actors.roles.reward_actor import RayRewardPort
from actors.roles.store_actor import RemoteStore
from actors.spec import FleetSpec
from rollout.environments.registry import build_envs
from rollout.episodes.episode import EpisodeSettings
from rollout.episodes.worker import EpisodeWorker, Outcome, WorkerSettings
from rollout.faults.prompts import PlantedPrompts
from rollout.rewards.pool import RewardPool
from rollout.rewards.registry import build_reward, needs_text
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.dispatch import Dispatch
from rollout.types.generation import SamplingParams
from rollout.types.trajectory import EngineTag


@ray.remote
class EpisodeActor:
    """Serves one `EpisodeWorker` on its event loop."""

    def __init__(self, spec: FleetSpec, index: int, store: Any, rewards: Sequence[Any]) -> None:
        enter_process(f"episodes-{index}", spec.run_dir)
        tokenizer = load_tokenizer(spec.model_dir)
        prompts = self._prompts = PlantedPrompts(tokenizer, spec.faults)
        sampling = SamplingParams(**spec.sampling.model_dump())
        ports = [RayRewardPort(handle, i) for i, handle in enumerate(rewards)]
        self._rewards = RewardPool(ports, spec.reward_workers.deadline_s)
        self._worker = EpisodeWorker(
            store=RemoteStore(store),
            score=self._rewards,
            tokenizer=tokenizer,
            make_envs=lambda prompt, count: build_envs(spec.environment, prompt, prompts.tokenizer_for(prompt), count),
            settings=WorkerSettings(
                episode=EpisodeSettings(
                    sampling=sampling,
                    max_context=spec.max_context,
                    seed=spec.seed if spec.deterministic else None,
                    decode=needs_text(build_reward(spec.reward)),
                ),
                deadline_s=spec.episodes.deadline_s,
                store_deadline_s=spec.store_deadline_s,
                max_attempts=spec.episodes.max_attempts,
            ),
        )

    async def place(self) -> Place:
        return here()

    async def connect(self, slot: int, engine: Any, tag: EngineTag) -> None:
        self._worker.connect(slot, RemoteEngine(engine, slot), tag)

    async def submit(self, dispatches: Sequence[Dispatch]) -> None:
        self._prompts.note(dispatches)
        self._worker.submit(dispatches)

    async def collect(self) -> tuple[Outcome, ...]:
        """Raises what no group of this worker survives: a store or a reward worker that is gone for good."""
        self._rewards.check()
        return await self._worker.collect()


class RayWorkerPort(RayEngineUser):
    """Implements `actors.ports.WorkerPort` for one incarnation."""

    def __init__(self, handle: Any, index: int) -> None:
        super().__init__(handle, f"episode worker {index}")

    async def submit(self, dispatches: Sequence[Dispatch]) -> None:
        await call(self.handle.submit.remote(dispatches), self.name)

    async def collect(self) -> tuple[Outcome, ...]:
        return await call(self.handle.collect.remote(), self.name)
