"""Faults of the reward: wrappers round a reward function. They know no process, but how to end their own."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from rollout.faults.config import FaultsConfig
from rollout.faults.data_config import LengthRewardFault, RewardFault
from rollout.faults.draws import drawn
from rollout.rewards.registry import needs_text
from rollout.types.prompts import Prompt
from rollout.types.protocols import RewardFunction
from rollout.types.trajectory import Reward, Trajectory

PART = "planted_length"
"""The part of a reward that `length_reward` adds."""


def _longer_is_better(reward: Reward, trajectory: Trajectory, fault: LengthRewardFault) -> Reward:
    extra = fault.per_token * trajectory.num_sampled
    return Reward(total=reward.total + extra, parts=(*reward.parts, (PART, extra)))


_CHANGES: Mapping[str, Callable[[Reward, Trajectory, Any], Reward]] = {
    "length_reward": _longer_is_better,
    "reward_flip": lambda reward, _, fault: replace(reward, total=1.0 - reward.total),
}
"""Kind -> what it makes of a reward. `dead_reward_worker` changes none."""


class PlantedReward:
    """A reward function round another; it hands on whether that one looks at text."""

    def __init__(self, inner: RewardFunction, fault: RewardFault, seed: int, die: Callable[[], None]) -> None:
        self.inner, self.needs_text = inner, needs_text(inner)
        self._fault, self._seed, self._die = fault, seed, die

    def __call__(self, prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
        fault, dies = self._fault, self._fault.type == "dead_reward_worker"
        key = trajectory.dispatch_id if dies else trajectory.trajectory_id
        newest = trajectory.version_spans[-1].policy.version
        acts = newest >= fault.start_version and drawn(fault.rate, self._seed, fault.type, key)
        if acts and dies:
            self._die()
        answer = cast("Reward | float", self.inner(prompt, completion, trajectory))  # a user's may be a plain number
        reward = answer if isinstance(answer, Reward) else Reward(total=float(answer))
        return _CHANGES[fault.type](reward, trajectory, fault) if acts and not dies else reward


def end_process() -> None:
    """End the process as a crash would: nothing is cleaned up."""
    os._exit(1)


def plant_reward(
    function: RewardFunction, faults: FaultsConfig, die: Callable[[], None] = end_process
) -> RewardFunction:
    """Wrap a reward function in the faults that are planted on rewards, in the order of the config; without any,
    `function` itself."""
    for fault in faults.plant:
        if isinstance(fault, RewardFault):
            function = PlantedReward(function, fault, faults.seed, die)
    return function
