"""Which prompts are held out. It samples nothing."""

from rollout.config import EnvironmentConfig, EvaluationConfig
from rollout.environments.registry import build_source
from rollout.types.prompts import Prompt, PromptCursor


def held_out_prompts(
    environment: EnvironmentConfig, evaluation: EvaluationConfig, seed: int, require_answer: bool = False
) -> tuple[Prompt, ...]:
    """The prompts of every evaluation of a run, always the same; empty where evaluation is off.

    Raises:
        UserError: there are too few sums, or the file is missing or malformed.
    """
    if not evaluation.every_steps:
        return ()
    source = build_source(environment, seed, require_answer, held_out=evaluation)
    return tuple(source.draw(PromptCursor(), min(evaluation.prompts, source.size))[0])
