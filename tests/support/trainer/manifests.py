"""Manifests of published weights that no directory holds."""

import numpy as np

from rollout.types.weights import Canary, PolicyVersion, TensorEntry, Transport, WeightManifest

ENTRIES = tuple(TensorEntry(name=name, dtype="F32", shape=(1,), sha256="0" * 64) for name in ("a", "b", "c"))


def disk_manifest(
    version: int, transport: Transport = Transport.DISK, location: str = "/run/weights"
) -> WeightManifest:
    canary = Canary(token_ids=np.zeros(2, dtype=np.int32), logprobs=np.zeros(1, dtype=np.float32))
    return WeightManifest(
        policy=PolicyVersion(1, version),
        transport=transport,
        location=location,
        tensors=ENTRIES,
        digest="d",
        canary=canary,
        num_bytes=12,
    )
