"""The tokens that a truncating sampler (top-k, top-p) could have drawn: listed where they are few. Numpy only; it knows
no engine and no model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.types.wire import wired

SUPPORT_LIMIT = 64
"""Most kept ids that are listed for a token: at most 256 bytes. Where more were kept, none is listed, and each model
cuts its own logits by the declared top-k and top-p: what two models may differ in is a token at the rim, which then has
less than 1/64 of the mass."""


@wired
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSupports:
    """For each of n tokens the ids that its sampler kept, itself among them; one behind the other."""

    counts: NDArray[np.uint8]
    """[n] ids of each token; 0 where none are listed: the token was given, or more than `SUPPORT_LIMIT` were kept."""
    ids: NDArray[np.int32]
    """[sum of counts]"""

    def __post_init__(self) -> None:
        if self.counts.dtype != np.uint8 or self.ids.dtype != np.int32 or self.ids.shape != (int(self.counts.sum()),):
            raise ValueError(
                f"supports have counts {self.counts.dtype} {self.counts.shape} with the sum {self.counts.sum()} and "
                f"ids {self.ids.dtype} {self.ids.shape}; expected uint8 counts and as many int32 ids"
            )

    def ends(self) -> NDArray[np.int64]:
        """[n] where the ids of each token end."""
        return np.cumsum(self.counts, dtype=np.int64)

    def cut(self, start: int, stop: int) -> "TokenSupports":
        """Those of the tokens [start, stop)."""
        first, last = (int(self.counts[:end].sum(dtype=np.int64)) for end in (start, stop))
        return TokenSupports(counts=self.counts[start:stop], ids=self.ids[first:last])

    def at(self, tokens: NDArray[np.int64]) -> "TokenSupports":
        """Those of these tokens, in their order."""
        counts = self.counts[tokens]
        before = np.cumsum(counts, dtype=np.int64) - counts
        shift = np.repeat((self.ends() - self.counts)[tokens] - before, counts)
        return TokenSupports(counts=counts, ids=self.ids[np.arange(shift.size) + shift])

    def without(self, token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """Tokens whose listed ids lack their own, [n] `token_ids`: no sampler drew them."""
        listed = np.flatnonzero(self.counts)
        if not listed.size:
            return listed
        hits = self.ids == np.repeat(token_ids, self.counts)
        return listed[~np.logical_or.reduceat(hits, (self.ends() - self.counts)[listed])]


def listed_supports(kept: Sequence[Sequence[int]]) -> TokenSupports:
    """From the kept ids of each token; of a token with more than `SUPPORT_LIMIT`, or none, nothing is listed."""
    rows = [row if len(row) <= SUPPORT_LIMIT else () for row in kept]
    return TokenSupports(
        counts=np.array([len(row) for row in rows], dtype=np.uint8),
        ids=np.array([token for row in rows for token in row], dtype=np.int32),
    )


def joined_supports(parts: Sequence[TokenSupports]) -> TokenSupports:
    """One behind the other."""
    return TokenSupports(
        counts=np.concatenate([np.zeros(0, dtype=np.uint8), *(part.counts for part in parts)]),
        ids=np.concatenate([np.zeros(0, dtype=np.int32), *(part.ids for part in parts)]),
    )


def unlisted(num_tokens: int) -> TokenSupports:
    """Of tokens that have none."""
    return TokenSupports(counts=np.zeros(num_tokens, dtype=np.uint8), ids=np.zeros(0, dtype=np.int32))
