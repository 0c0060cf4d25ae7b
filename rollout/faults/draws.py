"""Which requests a fault acts on. It knows no engine: a draw depends on seed, fault and id alone."""

import hashlib

from rollout.faults.config import FaultSection


def selected(fault: FaultSection, kind: str, seed: int, key: str) -> bool:
    """Whether `fault` acts on the request (or dispatch) `key`: a uniform number from a hash is below its rate.

    Args:
        kind: the fault's type; two kinds on one replica draw apart.
        seed: `faults.seed`.
        key: the id.
    """
    return drawn(fault.rate, seed, f"{kind}/{fault.replica}", key)


def drawn(rate: float, seed: int, kind: str, key: str) -> bool:
    """Whether a uniform number from a hash of the rest is below `rate`."""
    digest = hashlib.blake2b(f"{seed}/{kind}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < rate * 2.0**64
