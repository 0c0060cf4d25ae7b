"""Digests that two sides compute apart and compare: published tensors, canonical JSON."""

import hashlib
import json
from collections.abc import Iterable

from rollout.types.weights import TensorEntry


def canonical_json(value: object) -> bytes:
    """Sorted keys, separators `,` and `:`, UTF-8."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def json_digest(value: object) -> str:
    """SHA-256 of the canonical JSON of `value`, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def manifest_digest(tensors: Iterable[TensorEntry]) -> str:
    """One digest over names, dtypes, shapes and bytes of all tensors, whatever their order."""
    return json_digest(sorted([t.name, t.dtype, list(t.shape), t.sha256] for t in tensors))
