"""The proof that a published directory holds what its manifest says."""

from collections.abc import Iterable
from pathlib import Path

from rollout.errors import WeightSyncError, boundary
from rollout.published.manifest import digest_directory
from rollout.types.weights import TensorEntry, WeightManifest


def verify_directory(manifest: WeightManifest) -> None:
    """Read every byte of a disk manifest's directory and compare.

    Raises:
        WeightSyncError: a tensor is missing, unknown or different; the message names it.
    """
    with boundary(WeightSyncError, f"cannot read the published weights of {manifest.policy.key}"):
        found = digest_directory(Path(manifest.location))
    difference = describe_difference(manifest.tensors, found)
    if difference:
        raise WeightSyncError(
            f"weights of {manifest.policy.key} in {manifest.location}: {difference}; publish them again"
        )


def describe_difference(expected: Iterable[TensorEntry], found: Iterable[TensorEntry]) -> str:
    """What differs between two lists of tensors, in words; empty if nothing does."""
    wanted, present = {t.name: t for t in expected}, {t.name: t for t in found}
    missing, unknown = sorted(wanted.keys() - present.keys()), sorted(present.keys() - wanted.keys())
    changed = sorted(name for name in wanted.keys() & present.keys() if wanted[name] != present[name])
    parts = [
        f"{len(names)} {what} (first {names[0]})"
        for names, what in ((missing, "missing"), (unknown, "not published"), (changed, "different"))
        if names
    ]
    return ", ".join(parts)
