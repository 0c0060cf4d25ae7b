"""A reward worker in an actor of its own, restarted by Ray whenever its process ends."""

import asyncio
import contextlib
import time
from collections.abc import Generator, Sequence
from typing import Any

import ray

from actors.calls import call, kill
from actors.places import Place, here
from actors.process import enter_process
from actors.spec import FleetSpec
from rollout.errors import ProcessLostError
from rollout.faults.rewards import plant_reward
from rollout.rewards.errors import RewardFailure
from rollout.rewards.judging import judge_group
from rollout.rewards.pool import Judgement, RewardJob
from rollout.rewards.registry import build_reward

RETRY_S = 0.05
"""Wait between two questions to an actor that is being restarted."""


@ray.remote
class RewardActor:
    """Judges in the main thread of its process, one call at a time."""

    def __init__(self, spec: FleetSpec, index: int) -> None:
        enter_process(f"reward-{index}", spec.run_dir)
        self._function = plant_reward(build_reward(spec.reward), spec.faults)

    def place(self) -> Place:
        return here()

    def score(self, jobs: Sequence[RewardJob]) -> tuple[list[Judgement], float]:
        begun = time.perf_counter()
        judgements: list[Judgement] = []
        for job in jobs:
            try:
                judgements.append(judge_group(self._function, job.prompt, job.completions, job.trajectories))
            except RewardFailure as failure:
                judgements.append(failure)
        return judgements, time.perf_counter() - begun


class RayRewardPort:
    """Implements `rollout.rewards.pool.RewardPort`."""

    def __init__(self, handle: Any, index: int) -> None:
        self.handle = handle
        self._name = f"reward worker {index}"
        self._place: Place | None = None
        """Where the present incarnation runs; None before it is known."""
        self._lost = False

    async def score(self, jobs: Sequence[RewardJob]) -> tuple[Sequence[Judgement], float]:
        with self._noticing_loss():
            return await call(self.handle.score.remote(jobs), self._name)

    async def ready(self) -> None:
        with self._noticing_loss():
            self._place = await call(self.handle.place.remote(), self._name)

    @contextlib.contextmanager
    def _noticing_loss(self) -> Generator[None]:
        try:
            yield
        except ProcessLostError:
            self._lost = True
            raise

    async def replace(self) -> None:
        """Ray starts the actor anew when its process ends; the new one is ready when another process answers.

        A process that has ended is not killed again: that would hit its successor, and with it the next group.
        """
        old, lost = self._place, self._lost
        self._place, self._lost = None, False
        if not lost:
            kill(self.handle, no_restart=False)
        while True:
            with contextlib.suppress(ProcessLostError):
                place = await call(self.handle.place.remote(), self._name)
                if lost or place != old:  # else the one that is to end was quicker to answer than to die
                    self._place = place
                    return
            await asyncio.sleep(RETRY_S)
