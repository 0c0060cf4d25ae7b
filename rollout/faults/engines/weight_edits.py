"""What each fault in weights does to a published directory. It knows tensors by name, dtype and shape, and no
engine."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from rollout.errors import UserError
from rollout.faults.config import CorruptTensorFault, RoutingPerturbedFault, WeightFault
from rollout.faults.engines.doctored_files import (
    Edit,
    doctored_copy,
    linked_copy,
    refuse_other_transports,
    tensor_bytes,
)
from rollout.published.number_formats import FLOATS, decoded, encoded, rounded_to_e4m3
from rollout.types.weights import TensorEntry, WeightManifest

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.weight$")
_ROUTER = re.compile(r"\.(gate|router)\.weight$")
_EMBEDDING_OR_HEAD = re.compile(r"embed|head|wte|wpe")


class WeightDoctor:
    """One fault in weights. Its methods block on files."""

    def __init__(self, fault: WeightFault, seed: int, folder: Path) -> None:
        """Take `faults.seed`, and a folder of the fault's own, which need not exist."""
        self._fault, self._seed, self._kept_at, self._copy_at = fault, seed, folder / "kept", folder / "doctored"
        self._kept: WeightManifest | None = None
        """The weights when the fault began, for what stays old."""

    def check(self, manifest: WeightManifest) -> None:
        """Refuse a model on which the fault cannot act: every model can stay old as a whole.

        Raises:
            UserError: with the reason.
        """
        if self._fault.type == "stale_replica":
            return
        if not manifest.num_bytes:
            raise UserError(
                f"fault {self._fault.type} edits published files, and {manifest.policy.key} has none; use an engine "
                "that loads weights, or stale_replica"
            )
        self._edits(manifest)

    def remember(self, manifest: WeightManifest) -> None:
        """The engine has taken over these weights as they were published. Where something stays old, hold on to the
        files: the run may prune them."""
        if self._fault.type not in ("stale_replica", "stale_head"):
            return
        refuse_other_transports(manifest)
        if manifest.num_bytes:
            linked_copy(Path(manifest.location), self._kept_at)
            manifest = replace(manifest, location=str(self._kept_at))
        self._kept = manifest

    def doctored(self, manifest: WeightManifest) -> WeightManifest:
        """What the engine shall read instead; `manifest` itself where there is nothing to do yet.

        Of a stale replica only the policy's label is new, so the engine itself labels every token as if it had updated.
        """
        refuse_other_transports(manifest)
        if self._fault.type == "stale_replica":
            return manifest if self._kept is None else replace(self._kept, policy=manifest.policy)
        if self._fault.type == "stale_head" and self._kept is None:
            return manifest
        return doctored_copy(manifest, self._copy_at, self._edits(manifest))

    def _edits(self, manifest: WeightManifest) -> dict[str, Edit]:
        return _EDITS[self._fault.type](manifest, self._fault, self._seed, self._kept_at)


def _old_head(manifest: WeightManifest, fault: object, seed: int, kept_at: Path) -> dict[str, Edit]:
    heads = [tensor.name for tensor in manifest.tensors if _HEAD.search(tensor.name)]
    if not heads:
        raise UserError(
            "fault stale_head needs an output head of its own, but this model publishes none (it is tied to the "
            "embedding): use a model with tie_word_embeddings = false, or the fault stale_replica"
        )
    return {name: lambda _, name=name: tensor_bytes(kept_at, name) for name in heads}


def _low_precision(manifest: WeightManifest, fault: object, seed: int, kept_at: Path) -> dict[str, Edit]:
    return {
        tensor.name: lambda raw, tensor=tensor: encoded(
            rounded_to_e4m3(decoded(raw, tensor.dtype).reshape(tensor.shape)), tensor.dtype
        )
        for tensor in _matrices(manifest)
        if not _EMBEDDING_OR_HEAD.search(tensor.name)
    }


def _noisy_routers(manifest: WeightManifest, fault: RoutingPerturbedFault, seed: int, kept_at: Path) -> dict[str, Edit]:
    routers = [tensor for tensor in _matrices(manifest) if _ROUTER.search(tensor.name)]
    if not routers:
        raise UserError(
            "fault routing_perturbed needs the routers of a mixture of experts, and this model publishes none; "
            "use an MoE model"
        )
    return {tensor.name: _noisy(tensor, fault.noise, seed) for tensor in routers}


def _destroyed(manifest: WeightManifest, fault: CorruptTensorFault, seed: int, kept_at: Path) -> dict[str, Edit]:
    candidates = sorted(_floats(manifest), key=lambda tensor: tensor.name)
    if fault.tensor is None:
        candidates = [each for each in candidates if len(each.shape) >= 2 and not _EMBEDDING_OR_HEAD.search(each.name)]
    tensor = next((each for each in candidates if fault.tensor in (None, each.name)), None)
    if tensor is None:
        known = ", ".join(each.name for each in candidates[:3])
        raise UserError(
            f"fault corrupt_tensor: got tensor = {fault.tensor!r}; expected a published tensor of "
            f"{', '.join(sorted(FLOATS))}, such as {known or 'none'}"
        )
    value = np.nan if fault.how == "nan" else 0.0
    filled = encoded(np.full(tensor.shape, value, dtype=np.float32), tensor.dtype)
    return {tensor.name: lambda _: filled}


_EDITS: Mapping[str, Callable[[WeightManifest, Any, int, Path], dict[str, Edit]]] = {
    "stale_head": _old_head,
    "low_precision_replica": _low_precision,
    "routing_perturbed": _noisy_routers,
    "corrupt_tensor": _destroyed,
}
"""Kind -> (manifest, fault, seed, where the old weights are kept) -> the edits of the tensors that it is about."""


def _floats(manifest: WeightManifest) -> list[TensorEntry]:
    return [tensor for tensor in manifest.tensors if tensor.dtype in FLOATS]


def _matrices(manifest: WeightManifest) -> list[TensorEntry]:
    return [tensor for tensor in _floats(manifest) if len(tensor.shape) >= 2]


def _noisy(tensor: TensorEntry, noise: float, seed: int) -> Edit:
    """The same noise at every version: a router that is wrong, not one that is restless."""

    def edit(raw: bytes) -> bytes:
        values = decoded(raw, tensor.dtype)
        drawn = np.random.default_rng([seed, crc32(tensor.name.encode())]).standard_normal(values.size)
        return encoded((values + noise * float(values.std()) * drawn).astype(np.float32), tensor.dtype)

    return edit
