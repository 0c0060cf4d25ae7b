"""From an environment's config section to its prompt source and its environments."""

from rollout.config import ArithmeticConfig, EnvironmentConfig
from rollout.environments.arithmetic import ArithmeticSource
from rollout.environments.jsonl import JsonlSource
from rollout.environments.single_turn import SingleTurnEnv, prompt_tokens
from rollout.prompts import Prompt
from rollout.protocols import Env, PromptSource
from rollout.tokenizer import Tokenizer


def build_source(config: EnvironmentConfig, seed: int, require_answer: bool = False) -> PromptSource:
    """The prompt source of an environment.

    Args:
        seed: the run's seed; it and the pass fix the order.
        require_answer: `rollout.rewards.registry.needs_answer`: every prompt must bring a reference answer.

    Raises:
        UserError: the prompts are missing or malformed; the message names file and line.
    """
    if isinstance(config, ArithmeticConfig):
        return ArithmeticSource(config, seed)
    return JsonlSource(config, seed, require_answer)


def build_envs(config: EnvironmentConfig, prompt: Prompt, tokenizer: Tokenizer, count: int) -> tuple[Env, ...]:
    """`count` single-use environments for the samples of one group; the prompt is tokenized once.

    Raises:
        UserError: the prompt cannot be tokenized (messages without a chat template, for example).
    """
    template = not isinstance(config, ArithmeticConfig) and config.apply_chat_template
    ids = prompt_tokens(prompt, tokenizer, template)
    return tuple(SingleTurnEnv(config.type, ids) for _ in range(count))


def build_env(config: EnvironmentConfig, prompt: Prompt, tokenizer: Tokenizer) -> Env:
    """One environment."""
    return build_envs(config, prompt, tokenizer, 1)[0]
