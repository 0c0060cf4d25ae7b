"""The fixed prompt by which an engine shows that it samples from the weights that were published. Torch-free."""

import numpy as np
from numpy.typing import NDArray

CANARY_TOKENS = 32


def canary_token_ids(vocab_size: int, tokenizer_size: int, max_context: int | None) -> NDArray[np.int32]:
    """[C] ids that every engine of this model accepts: a fixed walk through the tokenizer's vocabulary, at most 32
    tokens.

    Args:
        vocab_size: rows of the embedding.
        tokenizer_size: ids of the tokenizer; ids above it have rows but no text.
        max_context: tokens of the longest sequence; one place is left for the token that an engine must sample to
            answer.
    """
    ids = min(vocab_size, tokenizer_size)
    length = CANARY_TOKENS if max_context is None else max(2, min(CANARY_TOKENS, max_context - 1))
    step = _coprime_step(ids)
    return ((np.arange(length, dtype=np.int64) * step + ids // 3) % ids).astype(np.int32)


def _coprime_step(ids: int) -> int:
    """A step near the golden section of `ids` that reaches every id."""
    step = max(1, int(ids * 0.6180339887))
    while np.gcd(step, ids) != 1:
        step += 1
    return step
