"""From a reward's config section to its function, and what the function needs."""

from collections.abc import Callable, Mapping
from typing import Any

from rollout.config import ExactMatchConfig, MathVerifyConfig, PythonRewardConfig, RewardConfig
from rollout.rewards.exact_match import ExactMatch
from rollout.rewards.math_verify import MathVerify
from rollout.rewards.python_function import load_function
from rollout.types.protocols import RewardFunction

_REWARDS: Mapping[type[object], tuple[Callable[[Any], RewardFunction], bool]] = {
    ExactMatchConfig: (ExactMatch, True),
    MathVerifyConfig: (lambda _: MathVerify(), True),
    PythonRewardConfig: (lambda config: load_function(config.function), False),
}
"""Section -> (its function, whether every prompt must bring a reference answer)."""


def build_reward(config: RewardConfig) -> RewardFunction:
    """The reward function of a run.

    Raises:
        UserError: a function of the user's own cannot be imported.
    """
    return _REWARDS[type(config)][0](config)


def needs_answer(config: RewardConfig) -> bool:
    """Whether every prompt must bring a reference answer."""
    return _REWARDS[type(config)][1]


def needs_text(function: RewardFunction) -> bool:
    """Whether the function looks at the completion's text.

    One that judges token ids sets its attribute `needs_text = False`, is given an empty text, and saves the decoding.
    """
    return bool(getattr(function, "needs_text", True))
