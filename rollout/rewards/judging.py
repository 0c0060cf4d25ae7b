"""The boundary around a reward function: it gives a finite number, or a failure with its reason. It knows no deadline
and no process."""

import math
from collections.abc import Sequence
from numbers import Real

from rollout.errors import ConcordError, boundary
from rollout.rewards.errors import RewardFailure, RewardInvalid, RewardRaised
from rollout.types.prompts import Prompt
from rollout.types.protocols import RewardFunction
from rollout.types.trajectory import Reward, Trajectory


def judge(function: RewardFunction, prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
    """The reward of one trajectory. The function may return a `Reward` or a plain number.

    Raises:
        RewardRaised: the function raised.
        RewardInvalid: it returned NaN, infinity, or something that is not a number.
    """
    try:
        what = f"the reward of {trajectory.trajectory_id} (prompt {prompt.prompt_id}) raised"
        with boundary(RewardRaised, what, placed=True):
            answer: object = function(prompt, completion, trajectory)
    except RewardFailure:
        raise
    except ConcordError as cause:
        raise RewardRaised(str(cause)) from cause
    return _checked(answer, trajectory.trajectory_id)


def judge_group(
    function: RewardFunction, prompt: Prompt, completions: Sequence[str], trajectories: Sequence[Trajectory]
) -> list[Reward]:
    """One reward a trajectory, in order.

    Raises:
        RewardFailure: as `judge`; the first failure ends the group.
    """
    return [
        judge(function, prompt, completion, trajectory)
        for completion, trajectory in zip(completions, trajectories, strict=True)
    ]


def _checked(answer: object, trajectory_id: str) -> Reward:
    if isinstance(answer, Reward):
        answer = Reward(total=_number(answer.total, trajectory_id), parts=answer.parts)
        for name, value in answer.parts:
            _number(value, f"{trajectory_id}, part {name!r}")
        return answer
    return Reward(total=_number(answer, trajectory_id))


def _number(value: object, where: str) -> float:
    if isinstance(value, Real):
        number = float(value)
        if math.isfinite(number):
            return number
    raise RewardInvalid(
        f"the reward of {where} is {value!r} ({type(value).__name__}); expected a finite number or a Reward"
    )
