"""Which requests a fault acts on. It knows no engine: a draw depends on seed, fault and id alone."""

import hashlib

from rollout.faults.config import EngineFault, PromptFault


def selected(fault: EngineFault | PromptFault, seed: int, key: str) -> bool:
    """Whether `fault` acts on the request (or dispatch) with the id `key`; two kinds on one replica draw apart."""
    return drawn(fault.rate, seed, f"{fault.type}/{fault.replica}", key)


def drawn(rate: float, seed: int, kind: str, key: str) -> bool:
    """Whether a uniform number from a hash of the rest is below `rate`; `seed` is `faults.seed`."""
    digest = hashlib.blake2b(f"{seed}/{kind}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < rate * 2.0**64
