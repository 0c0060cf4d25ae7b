"""A reward worker in an actor of its own, restarted by Ray whenever its process ends."""

import os
from collections.abc import Sequence
from typing import Any

import ray

from actors.calls import call, kill
from actors.process import enter_process
from actors.spec import FleetSpec
from rollout.errors import ProcessLostError
from rollout.prompts import Prompt
from rollout.rewards.judging import judge_group
from rollout.rewards.registry import build_reward
from rollout.trajectory import Reward, Trajectory


@ray.remote
class RewardActor:
    """Judges one group at a time, in the main thread of its process."""

    def __init__(self, spec: FleetSpec, index: int) -> None:
        enter_process(f"reward-{index}", spec.run_dir)
        self._function = build_reward(spec.reward)

    def pid(self) -> int:
        return os.getpid()

    def score(self, prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]) -> list[Reward]:
        return judge_group(self._function, prompt, completions, trajectories)


class RayRewardPort:
    """Implements `rollout.rewards.pool.RewardPort`."""

    def __init__(self, handle: Any, index: int) -> None:
        self.handle = handle
        self._name = f"reward worker {index}"

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]) -> Sequence[Reward]:
        return await call(self.handle.score.remote(prompt, trajectories, completions), self._name)

    async def replace(self) -> None:
        """Ray starts the actor anew when its process ends; the new one is ready when it answers."""
        kill(self.handle, no_restart=False)
        while True:
            try:
                await call(self.handle.pid.remote(), self._name)
            except ProcessLostError:
                continue
            return
