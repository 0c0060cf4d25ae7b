"""What truncated draws kept, as the trainer carries it: by trajectory, and by token of a micro-batch. Numpy only, on
the host: a chunk of it at a time is laid out where the model computes (`trainer.model.truncation`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.types.supports import TokenSupports, joined_supports, unlisted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Truncation:
    """How the draws of one trajectory were truncated."""

    top_p: float
    """1 is off."""
    top_k: int
    """0 is off."""
    supports: TokenSupports | None = None
    """[T] what the engine listed; None: nothing, and every token's is what top-k and top-p leave of the logits of the
    model that computes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Support:
    """The support of N tokens: the distribution that a token was drawn from is 0 outside it. The token itself always
    belongs to it."""

    top_p: NDArray[np.float64]
    """[N], 1 where it is off."""
    top_k: NDArray[np.int64]
    """[N], 0 where it is off."""
    listed: TokenSupports
    """[N]; where ids are listed they are the support, whatever top-p and top-k say."""


def support_of(parts: Sequence[tuple[Truncation | None, NDArray[np.int64]]]) -> Support | None:
    """The support of tokens, one behind the other; None where no draw was truncated.

    Args:
        parts: (how its draws were truncated, None: not at all; positions [n] of its tokens in it) of each trajectory.
    """
    if all(truncation is None for truncation, _ in parts):
        return None
    sizes = [positions.size for _, positions in parts]
    return Support(
        top_p=np.repeat([1.0 if each is None else each.top_p for each, _ in parts], sizes),
        top_k=np.repeat([0 if each is None else each.top_k for each, _ in parts], sizes).astype(np.int64),
        listed=joined_supports(
            [
                unlisted(positions.size) if each is None or each.supports is None else each.supports.at(positions)
                for each, positions in parts
            ]
        ),
    )
