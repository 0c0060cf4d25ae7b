"""Weight manifests on disk, and the proof that a directory holds what its manifest says. No torch: engines and tests
read this alike."""

import hashlib
import json
import mmap
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from rollout.errors import UserError, WeightSyncError, boundary
from rollout.published.digests import canonical_json, manifest_digest
from rollout.published.tensor_files import tensor_spans, weight_files
from rollout.types.weights import Canary, PolicyVersion, TensorEntry, Transport, WeightManifest

MANIFEST_NAME = "manifest.json"
_FORMAT = 1


def manifest_bytes(manifest: WeightManifest) -> bytes:
    """The JSON of a manifest. Its location is left out: on disk it is where the file stands."""
    return canonical_json(
        {
            "format": _FORMAT,
            "policy": manifest.policy.key,
            "transport": str(manifest.transport),
            "tensors": [[t.name, t.dtype, list(t.shape), t.sha256] for t in manifest.tensors],
            "digest": manifest.digest,
            "canary_token_ids": manifest.canary.token_ids.tolist(),
            "canary_logprobs": [float(value) for value in manifest.canary.logprobs],
            "num_bytes": manifest.num_bytes,
        }
    )


def write_manifest(directory: Path, manifest: WeightManifest) -> Path:
    """Write `manifest.json` into a directory that is not yet visible under its final name."""
    path = directory / MANIFEST_NAME
    path.write_bytes(manifest_bytes(manifest))
    return path


def read_manifest(directory: Path) -> WeightManifest:
    """The manifest of a published directory; its location is `directory`.

    Raises:
        WeightSyncError: there is none, or it contradicts itself.
    """
    path = directory / MANIFEST_NAME
    with boundary(WeightSyncError, f"cannot read {path} (expected a directory written by the trainer)"):
        fields: dict[str, Any] = json.loads(path.read_bytes())
        if fields["format"] != _FORMAT:
            raise WeightSyncError(f"{path} has format {fields['format']}; this version of Concord reads {_FORMAT}")
        manifest = WeightManifest(
            policy=PolicyVersion.parse(fields["policy"]),
            transport=Transport(fields["transport"]),
            location=str(directory),
            tensors=tuple(
                TensorEntry(name=name, dtype=dtype, shape=tuple(shape), sha256=sha256)
                for name, dtype, shape, sha256 in fields["tensors"]
            ),
            digest=fields["digest"],
            canary=Canary(
                token_ids=np.array(fields["canary_token_ids"], dtype=np.int32),
                logprobs=np.array(fields["canary_logprobs"], dtype=np.float32),
            ),
            num_bytes=int(fields["num_bytes"]),
        )
    if manifest_digest(manifest.tensors) != manifest.digest:
        raise WeightSyncError(
            f"{path} names digest {manifest.digest[:12]}… but its tensors make another; it was altered: publish again"
        )
    return manifest


def digest_file(path: Path) -> tuple[TensorEntry, ...]:
    """Every tensor of one safetensors file with the SHA-256 of its bytes, as they lie in the file.

    Raises:
        UserError: the file is broken.
    """
    spans = tensor_spans(path)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as view,
    ):
        digests = [hashlib.sha256(view[span.start : span.end]).hexdigest() for span in spans]
    return tuple(
        TensorEntry(name=span.name, dtype=span.dtype, shape=span.shape, sha256=digest)
        for span, digest in zip(spans, digests, strict=True)
    )


def digest_directory(directory: Path) -> tuple[TensorEntry, ...]:
    """Every tensor of a model directory with the SHA-256 of its bytes, sorted by name.

    Raises:
        UserError: a file is missing or broken, or two files hold a tensor of the same name.
    """
    entries = sorted(
        (entry for path in weight_files(directory) for entry in digest_file(path)), key=lambda entry: entry.name
    )
    twice = [a.name for a, b in pairwise(entries) if a.name == b.name]
    if twice:
        raise UserError(
            f"{directory} holds {twice[0]} in two files; expected each tensor once: publish or copy the model again"
        )
    return tuple(entries)
