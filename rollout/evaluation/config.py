"""Config of evaluations. Torch-free."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from rollout.config import Section


class EvaluationConfig(Section):
    """Periodic independent evaluation on held-out prompts. Environment, chat template, system prompt and reward are the
    run's; the sampling is its own."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations, version 0 and the last one included; 0 is off."""
    prompts: PositiveInt = 64
    """Held-out prompts. Arithmetic holds out other sums than those of the run, by its seed; `jsonl` takes so many of
    `path`, or all where it has fewer."""
    path: Path | None = None
    """With environment.type = "jsonl": the file of held-out prompts, with the columns of the environment's."""
    samples: PositiveInt = 1
    """Samples a prompt."""
    max_new_tokens: PositiveInt | None = None
    """Most tokens of one turn; None takes sampling.max_new_tokens."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this probability; 1 is off."""
    top_k: Annotated[int, Field(ge=0)] = 1
    """Sample from the k likeliest tokens: 1 is greedy, 0 is off."""
    max_overlap: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest share of held-out prompts that may also be training prompts (exactly, or by a run of 13 words); above it
    the run does not start."""
    deadline_s: PositiveFloat = 300.0
    """For one evaluation; past it there is no score, and an event says so."""
