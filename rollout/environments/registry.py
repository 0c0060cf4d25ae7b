"""From an environment's config section to its prompt source and its environments."""

from collections.abc import Callable, Mapping
from typing import Any

from rollout.config import ArithmeticConfig, EnvironmentConfig, EvaluationConfig, JsonlConfig
from rollout.environments import arithmetic, jsonl
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.prompts import Prompt
from rollout.types.protocols import Env, PromptSource

_Source = Callable[[Any, int, bool, EvaluationConfig | None], PromptSource]
_Envs = Callable[[Any, Prompt, Tokenizer, int], tuple[Env, ...]]
_ENVIRONMENTS: Mapping[type[object], tuple[_Source, _Envs]] = {
    ArithmeticConfig: (arithmetic.source, arithmetic.envs),
    JsonlConfig: (jsonl.source, jsonl.envs),
}
"""Section -> what `build_source` and `build_envs` call."""


def build_source(
    config: EnvironmentConfig, seed: int, require_answer: bool = False, held_out: EvaluationConfig | None = None
) -> PromptSource:
    """The prompt source of an environment.

    Args:
        seed: the run's seed; it and the pass fix the order.
        require_answer: `rollout.rewards.registry.needs_answer`: every prompt must bring a reference answer.
        held_out: give the prompts of this evaluation instead, which are kept from training.

    Raises:
        UserError: the prompts are missing or malformed; the message names file and line.
    """
    return _ENVIRONMENTS[type(config)][0](config, seed, require_answer, held_out)


def build_envs(config: EnvironmentConfig, prompt: Prompt, tokenizer: Tokenizer, count: int) -> tuple[Env, ...]:
    """`count` single-use environments for the samples of one group; the prompt is tokenized once.

    Raises:
        UserError: the prompt cannot be tokenized (messages without a chat template, for example).
    """
    return _ENVIRONMENTS[type(config)][1](config, prompt, tokenizer, count)
