"""A pool of reward workers behind one `Judge`: a deadline for each call, and a new worker for one that hangs or dies.

It owns which worker is idle. It must not know what a worker is made of: an actor, a thread, a fake.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from rollout.errors import ProcessLostError
from rollout.prompts import Prompt
from rollout.rewards.errors import RewardTimeout, RewardWorkerDied
from rollout.trajectory import Reward, Trajectory


class RewardPort(Protocol):
    """One reward worker."""

    async def score(self, prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]) -> Sequence[Reward]:
        """One reward a trajectory. Raises a `RewardFailure`, or `ProcessLostError` when the worker is gone."""
        ...

    async def replace(self) -> None:
        """End the worker if it lives, and answer when a new one is ready."""
        ...


class RewardPool:
    """Implements `rollout.episode.Judge`."""

    def __init__(self, workers: Sequence[RewardPort], deadline_s: float) -> None:
        self._idle: asyncio.LifoQueue[RewardPort] = asyncio.LifoQueue()
        for worker in workers:
            self._idle.put_nowait(worker)
        self._deadline_s = deadline_s
        self._replacements: set[asyncio.Task[None]] = set()
        self.replaced = 0

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]) -> Sequence[Reward]:
        """Judge one group on an idle worker; waiting for one is not part of the deadline.

        Raises:
            RewardFailure: the reward raised, was invalid, passed its deadline, or its worker died.
        """
        worker = await self._idle.get()
        broken = True
        try:
            async with asyncio.timeout(self._deadline_s):
                rewards = await worker.score(prompt, trajectories, completions)
            broken = False
        except TimeoutError as cause:
            raise RewardTimeout(
                f"the reward of prompt {prompt.prompt_id} took longer than reward_workers.deadline_s = {self._deadline_s:g}; its worker is replaced"
            ) from cause
        except ProcessLostError as cause:
            raise RewardWorkerDied(f"the reward worker died while it judged prompt {prompt.prompt_id}: {cause}") from cause
        except asyncio.CancelledError:
            raise
        except BaseException:
            broken = False
            raise
        finally:
            self._give_back(worker, broken)
        return rewards

    def _give_back(self, worker: RewardPort, broken: bool) -> None:
        if not broken:
            self._idle.put_nowait(worker)
            return
        self.replaced += 1
        task = asyncio.create_task(self._replace(worker))
        self._replacements.add(task)
        task.add_done_callback(self._replacements.discard)

    async def _replace(self, worker: RewardPort) -> None:
        await worker.replace()
        self._idle.put_nowait(worker)
