"""A reward worker in an actor of its own, restarted by Ray whenever its process ends."""

import os
import time
from collections.abc import Sequence
from typing import Any

import ray

from actors.calls import call, kill
from actors.process import enter_process
from actors.spec import FleetSpec
from rollout.errors import ProcessLostError
from rollout.rewards.errors import RewardFailure
from rollout.rewards.judging import judge_group
from rollout.rewards.pool import Judgement, RewardJob
from rollout.rewards.registry import build_reward


@ray.remote
class RewardActor:
    """Judges in the main thread of its process, one call at a time."""

    def __init__(self, spec: FleetSpec, index: int) -> None:
        enter_process(f"reward-{index}", spec.run_dir)
        self._function = build_reward(spec.reward)

    def pid(self) -> int:
        return os.getpid()

    def score(self, jobs: Sequence[RewardJob]) -> tuple[list[Judgement], float]:
        begun = time.perf_counter()
        return [self._judge(job) for job in jobs], time.perf_counter() - begun

    def _judge(self, job: RewardJob) -> Judgement:
        try:
            return judge_group(self._function, job.prompt, job.completions, job.trajectories)
        except RewardFailure as failure:
            return failure


class RayRewardPort:
    """Implements `rollout.rewards.pool.RewardPort`."""

    def __init__(self, handle: Any, index: int) -> None:
        self.handle = handle
        self._name = f"reward worker {index}"

    async def score(self, jobs: Sequence[RewardJob]) -> tuple[Sequence[Judgement], float]:
        return await call(self.handle.score.remote(jobs), self._name)

    async def replace(self) -> None:
        """Ray starts the actor anew when its process ends; the new one is ready when it answers."""
        kill(self.handle, no_restart=False)
        while True:
            try:
                await call(self.handle.pid.remote(), self._name)
            except ProcessLostError:
                continue
            return
