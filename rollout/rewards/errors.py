"""How a reward fails, one class a reason. They cross processes, so each is built from its message alone."""

from rollout.errors import RewardError
from rollout.types.dispatch import FailReason


class RewardFailure(RewardError):
    """A reward error that knows how its dispatch ends."""

    reason: FailReason = FailReason.REWARD_RAISED


class RewardRaised(RewardFailure):
    """The reward function raised."""


class RewardInvalid(RewardFailure):
    """The reward function returned something that is not a finite number."""

    reason = FailReason.REWARD_INVALID


class RewardTimeout(RewardFailure):
    """The reward passed its deadline."""

    reason = FailReason.REWARD_TIMEOUT


class RewardWorkerDied(RewardFailure):
    """The process that judged is gone."""

    reason = FailReason.REWARD_WORKER_DIED
