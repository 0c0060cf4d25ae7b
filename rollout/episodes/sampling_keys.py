"""The key that deterministic mode sends with each sample of a request, which fixes every random draw of it. It must
never depend on arrival order, replica, attempt or process (an engine's own keys, for requests without, do)."""

import hashlib

from rollout.published.digests import canonical_json

_MASK_63 = (1 << 63) - 1


def sampling_key(seed: int, pass_index: int, prompt_id: str, sample_index: int, turn: int = 0) -> int:
    """63-bit key of one sample's draws: BLAKE2b over the canonical JSON of the arguments. Samples of a group and turns
    of a conversation count from 0."""
    digest = hashlib.blake2b(canonical_json([seed, pass_index, prompt_id, sample_index, turn]), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK_63
