"""From a reward's config section to its function, and what the function needs."""

from rollout.config import ExactMatchConfig, MathVerifyConfig, RewardConfig
from rollout.rewards.exact_match import ExactMatch
from rollout.rewards.math_verify import MathVerify
from rollout.rewards.python_function import load_function
from rollout.types.protocols import RewardFunction


def build_reward(config: RewardConfig) -> RewardFunction:
    """The reward function of a run.

    Raises:
        UserError: a function of the user's own cannot be imported.
    """
    if isinstance(config, ExactMatchConfig):
        return ExactMatch(config)
    if isinstance(config, MathVerifyConfig):
        return MathVerify()
    return load_function(config.function)


def needs_answer(config: RewardConfig) -> bool:
    """Whether every prompt must bring a reference answer."""
    return isinstance(config, ExactMatchConfig | MathVerifyConfig)


def needs_text(function: RewardFunction) -> bool:
    """Whether the function looks at the completion's text.

    One that judges token ids sets its attribute `needs_text = False`, is given an empty text, and saves the decoding.
    """
    return bool(getattr(function, "needs_text", True))
