"""What an engine sampled, as rows of a dump in every layout."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dump_engine import Rows, Sampled


def token_rows(sampled: Sampled, logs: Sequence[NDArray[np.float64]] | None = None, **more: Any) -> Rows:  # noqa: ANN401
    """Layout `tokens`."""
    logs = sampled.logprobs if logs is None else logs
    return [
        {
            "token_ids": [*prompt.tolist(), *answer.tolist()],
            "mask": [0] * prompt.size + [1] * answer.size,
            "logprobs": [0.0] * prompt.size + log.tolist(),
            **more,
        }
        for prompt, answer, log in zip(sampled.prompts, sampled.answers, logs, strict=True)
    ]


def completion_rows(sampled: Sampled, **more: Any) -> Rows:  # noqa: ANN401
    """Layout `completion`."""
    return [
        {"prompt_ids": prompt.tolist(), "completion_ids": answer.tolist(), "completion_logprobs": log.tolist(), **more}
        for prompt, answer, log in zip(sampled.prompts, sampled.answers, sampled.logprobs, strict=True)
    ]


def next_token_rows(sampled: Sampled, spare: int) -> Rows:
    """Layout `next_token`; `spare` entries at the end are about no token."""
    return [
        {
            "token_ids": [*prompt.tolist(), *answer.tolist()],
            "mask": [0] * (prompt.size - 1) + [1] * answer.size + [0] * spare,
            "logprobs": [None] * (prompt.size - 1) + log.tolist() + [None] * spare,
        }
        for prompt, answer, log in zip(sampled.prompts, sampled.answers, sampled.logprobs, strict=True)
    ]
