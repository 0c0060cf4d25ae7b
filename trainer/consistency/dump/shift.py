"""Whether log-probs stand one place beside their tokens: the fault of mixing up token-aligned and next-token-aligned
columns. Numpy only.

It owns that one question; it must never know a model, and it moves nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainer.consistency.checks.mismatch import inside
from trainer.types.evidence import Check, CheckFinding

CLOSED_SHARE = 0.8
"""A shift is reported if it closes this share of the gap, as for every cause that is true of all tokens or of none."""
_PLACES = {
    1: "one place early: entry t is about token t + 1, as in layout next_token",
    -1: "one place late: entry t is about token t - 1",
}


def check_shift(
    scores: Sequence[NDArray[np.float32]], logged: Sequence[NDArray[np.float32]], masks: Sequence[NDArray[np.bool_]]
) -> tuple[CheckFinding, ...]:
    """A finding where the log, moved by one place, agrees with the scores by at least 80 % of the gap.

    Args:
        scores: [T] nats a row, by the trainer.
        logged: [T] nats a row, as in the dump.
        masks: [T] a row, tokens that were sampled and scored; a pair of neighbours counts where both were.
    """
    for offset, where in _PLACES.items():
        straight, moved = _gaps(scores, logged, masks, offset)
        if straight > 0.0 and moved <= (1.0 - CLOSED_SHARE) * straight:
            detail = f"mean |d| {straight:.3g} nats as logged and {moved:.3g} moved by one place; the log is {where}"
            return (CheckFinding.failure(Check.STRUCTURE, "logprobs_shifted", detail),)
    return ()


def _gaps(
    scores: Sequence[NDArray[np.float32]],
    logged: Sequence[NDArray[np.float32]],
    masks: Sequence[NDArray[np.bool_]],
    offset: int,
) -> tuple[float, float]:
    """Mean |d| of the same entries of the log against their own token and against the token `offset` places on; (0, 0)
    without pairs."""
    here, there = (slice(None, -1), slice(1, None)) if offset > 0 else (slice(1, None), slice(None, -1))
    both = [mask[here] & mask[there] for mask in masks]
    log = inside("log-probs", [row[here] for row in logged], both)
    if not log.size:
        return 0.0, 0.0
    straight, moved = (
        float(np.abs(inside("scores", [row[place] for row in scores], both) - log).mean()) for place in (here, there)
    )
    return straight, moved
