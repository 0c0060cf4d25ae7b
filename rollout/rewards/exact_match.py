"""Exact match with the reference answer."""

from rollout.config import ExactMatchConfig
from rollout.types.prompts import Prompt
from rollout.types.trajectory import FinishReason, Reward, Trajectory


class ExactMatch:
    """1 when the completion equals the answer and ended with the end token, else 0."""

    def __init__(self, config: ExactMatchConfig) -> None:
        self._strip = config.strip

    def __call__(self, prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
        """A sample that was cut off is wrong, even where its text agrees so far."""
        if prompt.answer is None:
            raise ValueError(f"prompt {prompt.prompt_id} has no answer to match")
        got, wanted = (completion.strip(), prompt.answer.strip()) if self._strip else (completion, prompt.answer)
        return Reward(total=float(trajectory.finish_reason is FinishReason.STOP and got == wanted))
