"""From an environment's config section to its prompt source and its environments."""

import numpy as np
from numpy.typing import NDArray

from rollout.config import ArithmeticConfig, EnvironmentConfig
from rollout.environments.arithmetic import LATER, ArithmeticSource
from rollout.environments.fixed_turns import FixedTurnsEnv
from rollout.environments.jsonl import JsonlSource
from rollout.environments.single_turn import SingleTurnEnv, prompt_tokens
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.prompts import Prompt
from rollout.types.protocols import Env, PromptSource


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
    if isinstance(config, ArithmeticConfig) and config.turns > 1:
        replies = [_continued(tokenizer, text) for key, text in prompt.metadata if key == LATER]
        return tuple(FixedTurnsEnv(config.type, ids, replies) for _ in range(count))
    return tuple(SingleTurnEnv(config.type, ids) for _ in range(count))


def _continued(tokenizer: Tokenizer, text: str) -> NDArray[np.int32]:
    """[n] ids of a text that goes on a conversation: no token begins it anew."""
    ids = tokenizer.encode(text)
    return ids[1:] if ids.size and ids[0] == tokenizer.bos_id else ids


def build_env(config: EnvironmentConfig, prompt: Prompt, tokenizer: Tokenizer) -> Env:
    """One environment."""
    return build_envs(config, prompt, tokenizer, 1)[0]
