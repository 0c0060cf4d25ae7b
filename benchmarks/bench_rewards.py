"""Reward functions of the benchmarks; both judge token ids, so that nothing is decoded."""

import json

from rollout.types.prompts import Prompt
from rollout.types.trajectory import Trajectory

EOS = 1


def nothing(prompt: Prompt, completion: str, trajectory: Trajectory) -> float:
    """Costs nothing and says nothing."""
    return 0.0


nothing.needs_text = False  # pyright: ignore[reportFunctionMemberAccess]


def fixed_work(prompt: Prompt, completion: str, trajectory: Trajectory) -> float:
    """`reward_ids` of the fixed workload: exact match up to the first end token, whatever was forced behind it."""
    ids = trajectory.token_ids[trajectory.sampled].tolist()
    if EOS in ids:
        ids = ids[: ids.index(EOS) + 1]
    wanted = json.loads(dict(prompt.metadata)["answer_token_ids"])
    return 1.0 if ids == wanted else 0.0


fixed_work.needs_text = False  # pyright: ignore[reportFunctionMemberAccess]
