"""Copies of published directories in which a few tensors differ. It never writes into a published file, and knows no
engine."""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from rollout.errors import EngineError, boundary
from rollout.published.digests import manifest_digest
from rollout.published.manifest import MANIFEST_NAME, write_manifest
from rollout.published.tensor_files import TensorSpan, tensor_spans, weight_files
from rollout.types.weights import Transport, WeightManifest

Edit: TypeAlias = Callable[[bytes], bytes]
"""The bytes of a tensor -> as many other bytes."""


def doctored_copy(manifest: WeightManifest, target: Path, edits: Mapping[str, Edit]) -> WeightManifest:
    """Write the manifest's directory to `target` with some tensors edited, and describe it.

    Files without an edited tensor are hard links where the file system allows, else copies.

    Args:
        manifest: names a directory on disk.
        target: what stands there is removed first.
        edits: by tensor name; the names are in the manifest.

    Returns:
        The manifest of `target`: digests of the bytes that lie there, everything else as in `manifest`.

    Raises:
        EngineError: the weights do not come by disk, or a file cannot be read or written.
    """
    refuse_other_transports(manifest)
    source = Path(manifest.location)
    with boundary(EngineError, f"a doctored copy of {source}"):
        edited = {
            file.name: [span for span in tensor_spans(file) if span.name in edits] for file in weight_files(source)
        }
        linked_copy(source, target, frozenset(name for name, spans in edited.items() if spans))
        hashes = {
            span.name: _rewrite(target / name, span, edits[span.name])
            for name, spans in edited.items()
            for span in spans
        }
        tensors = tuple(replace(tensor, sha256=hashes.get(tensor.name, tensor.sha256)) for tensor in manifest.tensors)
        doctored = replace(manifest, location=str(target), tensors=tensors, digest=manifest_digest(tensors))
        if (source / MANIFEST_NAME).is_file():
            write_manifest(target, doctored)
    return doctored


def linked_copy(source: Path, target: Path, copied: frozenset[str] = frozenset()) -> None:
    """Hard links to all files of `source` but its manifest, in place of whatever stands at `target`; the files named in
    `copied` are copied."""

    def place(file: str, at: str) -> str:
        real = Path(file).resolve()
        if Path(file).name not in copied:
            try:
                os.link(real, at)
                return at
            except OSError:  # another file system: a copy does as well
                pass
        shutil.copyfile(real, at)
        return at

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=place, ignore=shutil.ignore_patterns(MANIFEST_NAME))


def tensor_bytes(directory: Path, name: str) -> bytes:
    """The bytes of one tensor of a model directory.

    Raises:
        EngineError: it is not there, or its file cannot be read.
    """
    with boundary(EngineError, f"tensor {name} in {directory}"):
        for file in weight_files(directory):
            for span in tensor_spans(file):
                if span.name == name:
                    with file.open("rb") as opened:
                        opened.seek(span.start)
                        return opened.read(span.end - span.start)
    raise EngineError(
        f"{directory} holds no tensor {name}; expected the layout of the directory before it: publish the whole model "
        "each time"
    )


def refuse_other_transports(manifest: WeightManifest) -> None:
    """A fault in weights can be planted into files only.

    Raises:
        EngineError: the weights come by another transport.
    """
    if manifest.transport is not Transport.DISK:
        raise EngineError(
            f"got weights {manifest.policy.key} by {manifest.transport.value}; faults in weights act on files: set "
            "weights.transport = 'disk'"
        )


def _rewrite(file: Path, span: TensorSpan, edit: Edit) -> str:
    """Edit one tensor in place; the SHA-256 of its new bytes."""
    with file.open("r+b") as opened:
        opened.seek(span.start)
        raw = edit(opened.read(span.end - span.start))
        if len(raw) != span.end - span.start:
            raise EngineError(
                f"the edit of {span.name} makes {len(raw)} bytes of {span.end - span.start}; expected as many"
            )
        opened.seek(span.start)
        opened.write(raw)
    return hashlib.sha256(raw).hexdigest()
