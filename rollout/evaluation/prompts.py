"""Which prompts are held out. It samples nothing."""

from rollout.config import ArithmeticConfig, EnvironmentConfig
from rollout.environments.arithmetic import ArithmeticSource
from rollout.environments.jsonl import JsonlSource
from rollout.errors import UserError
from rollout.evaluation.config import EvaluationConfig
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
    if isinstance(environment, ArithmeticConfig):
        source = ArithmeticSource(
            environment.model_copy(update={"prompts": evaluation.prompts}), seed, skip=environment.prompts
        )
    elif evaluation.path is None:
        raise UserError(
            'got evaluation.every_steps with environment.type = "jsonl" and no evaluation.path; set it to a file of'
            " held-out prompts"
        )
    else:
        source = JsonlSource(environment.model_copy(update={"path": evaluation.path}), seed, require_answer)
    return tuple(source.draw(PromptCursor(), min(evaluation.prompts, source.size))[0])
