"""Faults of the reward: wrappers round a reward function. They know no process, but how to end their own."""

import os
from collections.abc import Callable
from typing import cast

from rollout.faults.config import FaultsConfig
from rollout.faults.data_config import DeadRewardWorkerFault, LengthRewardFault, RewardFault, RewardFaultSection
from rollout.faults.draws import drawn
from rollout.rewards.registry import needs_text
from rollout.types.prompts import Prompt
from rollout.types.protocols import RewardFunction
from rollout.types.trajectory import Reward, Trajectory

PART = "planted_length"
"""The part of a reward that `length_reward` adds."""


class _PlantedReward:
    """A reward function round another; it hands on whether that one looks at text."""

    def __init__(self, inner: RewardFunction, fault: RewardFaultSection, kind: str, seed: int) -> None:
        self.inner, self.needs_text = inner, needs_text(inner)
        self._fault, self._kind, self._seed = fault, kind, seed

    def acts(self, trajectory: Trajectory, key: str) -> bool:
        """Whether the fault acts on this trajectory."""
        newest = trajectory.version_spans[-1].policy.version
        return newest >= self._fault.start_version and drawn(self._fault.rate, self._seed, self._kind, key)

    def judged(self, prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
        """What the reward should be."""
        answer = cast(
            "Reward | float", self.inner(prompt, completion, trajectory)
        )  # a user's function may return a plain number
        return answer if isinstance(answer, Reward) else Reward(total=float(answer))


class LengthReward(_PlantedReward):
    """Longer is better."""

    def __init__(self, inner: RewardFunction, fault: LengthRewardFault, seed: int) -> None:
        super().__init__(inner, fault, fault.type, seed)
        self._per_token = fault.per_token

    def __call__(self, prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
        reward = self.judged(prompt, completion, trajectory)
        if not self.acts(trajectory, trajectory.trajectory_id):
            return reward
        extra = self._per_token * trajectory.num_sampled
        return Reward(total=reward.total + extra, parts=(*reward.parts, (PART, extra)))


class FlippedReward(_PlantedReward):
    """Wrong is right."""

    def __call__(self, prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
        reward = self.judged(prompt, completion, trajectory)
        return (
            Reward(total=1.0 - reward.total, parts=reward.parts)
            if self.acts(trajectory, trajectory.trajectory_id)
            else reward
        )


class DeadlyReward(_PlantedReward):
    """Ends its process at some dispatches."""

    def __init__(self, inner: RewardFunction, fault: DeadRewardWorkerFault, seed: int, die: Callable[[], None]) -> None:
        super().__init__(inner, fault, fault.type, seed)
        self._die = die

    def __call__(self, prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
        if self.acts(trajectory, trajectory.dispatch_id):
            self._die()
        return self.judged(prompt, completion, trajectory)


def end_process() -> None:
    """As a crash would: nothing is cleaned up."""
    os._exit(1)


def plant_reward(
    function: RewardFunction, faults: FaultsConfig, die: Callable[[], None] = end_process
) -> RewardFunction:
    """Wrap a reward function in the faults that are planted on rewards, in the order of the config; without any,
    `function` itself."""
    for fault in faults.plant:
        if isinstance(fault, LengthRewardFault):
            function = LengthReward(function, fault, faults.seed)
        elif isinstance(fault, DeadRewardWorkerFault):
            function = DeadlyReward(function, fault, faults.seed, die)
        elif isinstance(fault, RewardFault):
            function = FlippedReward(function, fault, fault.type, faults.seed)
    return function
