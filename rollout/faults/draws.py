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
    digest = hashlib.blake2b(f"{seed}/{kind}/{fault.replica}/{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fault.rate * 2.0**64
