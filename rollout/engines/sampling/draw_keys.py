"""The keys that fix the draws of a request: those that it brings, or the engine's own. An engine's own differ from
replica to replica and from attempt to attempt; those that deterministic mode sends along do not
(`rollout.episodes.sampling_keys`)."""

import hashlib
import struct

from rollout.types.generation import GenerationRequest


def request_keys(request: GenerationRequest, seed: int, replica: int) -> tuple[int, ...]:
    """The request's seeds, or 63-bit keys drawn from the run's seed, the replica and the request's id."""
    if request.seeds:
        return request.seeds
    stream = hashlib.shake_128(f"{seed}/{replica}/{request.request_id}".encode()).digest(8 * request.num_samples)
    return tuple(key >> 1 for key in struct.unpack(f"<{request.num_samples}Q", stream))
