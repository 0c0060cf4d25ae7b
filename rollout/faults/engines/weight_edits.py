"""What each fault in weights does to a published directory. It knows tensors by name, dtype and shape, and no
engine."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol
from zlib import crc32

import numpy as np

from rollout.errors import UserError
from rollout.faults.config import (
    CorruptTensorFault,
    LowPrecisionReplicaFault,
    RoutingPerturbedFault,
    StaleHeadFault,
    StaleReplicaFault,
    WeightFault,
)
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


class WeightDoctor(Protocol):
    """One fault in weights. Its methods block on files."""

    def check(self, manifest: WeightManifest) -> None:
        """Refuse a model on which the fault cannot act.

        Raises:
            UserError: with the reason.
        """
        ...

    def remember(self, manifest: WeightManifest) -> None:
        """The engine has taken over these weights as they were published."""
        ...

    def doctored(self, manifest: WeightManifest) -> WeightManifest:
        """What the engine shall read instead; `manifest` itself where there is nothing to do yet."""
        ...


class StaleWeights:
    """All weights stay as they were when the fault began. Only the policy's label is new, so the engine itself labels
    every token as if it had updated."""

    def __init__(self, scratch: Path) -> None:
        self._kept_at = scratch / "kept"
        self._kept: WeightManifest | None = None

    def check(self, manifest: WeightManifest) -> None:
        """Every model can stay old."""

    def remember(self, manifest: WeightManifest) -> None:
        """Hold on to the files: the run may prune them."""
        refuse_other_transports(manifest)
        if manifest.num_bytes:
            linked_copy(Path(manifest.location), self._kept_at)
            manifest = replace(manifest, location=str(self._kept_at))
        self._kept = manifest

    def doctored(self, manifest: WeightManifest) -> WeightManifest:
        """The old weights under the new label."""
        refuse_other_transports(manifest)
        return manifest if self._kept is None else replace(self._kept, policy=manifest.policy)


class StaleHead:
    """The output head stays as it was when the fault began."""

    def __init__(self, scratch: Path) -> None:
        self._kept_at, self._copy_at, self._remembers = scratch / "kept", scratch / "doctored", False

    def check(self, manifest: WeightManifest) -> None:
        """Refuse a model whose head is its embedding, and weights without files."""
        _refuse_no_files(manifest, "stale_head")
        if not _heads(manifest):
            raise UserError(
                "fault stale_head needs an output head of its own, but this model publishes none (it is tied to the "
                "embedding): use a model with tie_word_embeddings = false, or the fault stale_replica"
            )

    def remember(self, manifest: WeightManifest) -> None:
        """Hold on to the files: the run may prune them."""
        linked_copy(Path(manifest.location), self._kept_at)
        self._remembers = True

    def doctored(self, manifest: WeightManifest) -> WeightManifest:
        """The new weights with the old head."""
        if not self._remembers:
            return manifest
        return doctored_copy(
            manifest, self._copy_at, {name: _constant(tensor_bytes(self._kept_at, name)) for name in _heads(manifest)}
        )


class EditedWeights:
    """Some tensors of each publication are edited; nothing is remembered."""

    def __init__(
        self, fault: LowPrecisionReplicaFault | RoutingPerturbedFault | CorruptTensorFault, seed: int, scratch: Path
    ) -> None:
        self._fault, self._seed, self._copy_at = fault, seed, scratch / "doctored"

    def check(self, manifest: WeightManifest) -> None:
        """Refuse a model without a tensor that the fault is about."""
        _refuse_no_files(manifest, self._fault.type)
        self._edits(manifest)

    def remember(self, manifest: WeightManifest) -> None:
        """Nothing."""

    def doctored(self, manifest: WeightManifest) -> WeightManifest:
        """The new weights, edited."""
        return doctored_copy(manifest, self._copy_at, self._edits(manifest))

    def _edits(self, manifest: WeightManifest) -> dict[str, Edit]:
        fault = self._fault
        if isinstance(fault, CorruptTensorFault):
            tensor = _chosen(manifest, fault.tensor)
            return {tensor.name: _constant(_filled(tensor, np.nan if fault.how == "nan" else 0.0))}
        matrices = [tensor for tensor in manifest.tensors if len(tensor.shape) >= 2 and tensor.dtype in FLOATS]
        if isinstance(fault, RoutingPerturbedFault):
            routers = [tensor for tensor in matrices if _ROUTER.search(tensor.name)]
            if not routers:
                raise UserError(
                    "fault routing_perturbed needs the routers of a mixture of experts, and this model publishes none; "
                    "use an MoE model"
                )
            return {tensor.name: _noisy(tensor, fault.noise, self._seed) for tensor in routers}
        return {
            tensor.name: _low_precision(tensor) for tensor in matrices if not _EMBEDDING_OR_HEAD.search(tensor.name)
        }


def weight_doctor(fault: WeightFault, seed: int, scratch: Path) -> WeightDoctor:
    """The doctor of a fault.

    Args:
        seed: `faults.seed`.
        scratch: a folder of its own, which need not exist.
    """
    if isinstance(fault, StaleReplicaFault):
        return StaleWeights(scratch)
    if isinstance(fault, StaleHeadFault):
        return StaleHead(scratch)
    return EditedWeights(fault, seed, scratch)


def _heads(manifest: WeightManifest) -> list[str]:
    return [tensor.name for tensor in manifest.tensors if _HEAD.search(tensor.name)]


def _chosen(manifest: WeightManifest, name: str | None) -> TensorEntry:
    candidates = sorted(
        (tensor for tensor in manifest.tensors if tensor.dtype in FLOATS), key=lambda tensor: tensor.name
    )
    if name is None:
        candidates = [
            tensor for tensor in candidates if len(tensor.shape) >= 2 and not _EMBEDDING_OR_HEAD.search(tensor.name)
        ]
    found = next((tensor for tensor in candidates if name in (None, tensor.name)), None)
    if found is None:
        known = ", ".join(_names(candidates))
        raise UserError(
            f"fault corrupt_tensor: got tensor = {name!r}; expected a published tensor of {', '.join(sorted(FLOATS))}, "
            f"such as {known or 'none'}"
        )
    return found


def _names(tensors: Sequence[TensorEntry]) -> list[str]:
    return [tensor.name for tensor in tensors[:3]]


def _refuse_no_files(manifest: WeightManifest, fault: str) -> None:
    if not manifest.num_bytes:
        raise UserError(
            f"fault {fault} edits published files, and {manifest.policy.key} has none; use an engine that loads "
            "weights, or stale_replica"
        )


def _constant(raw: bytes) -> Edit:
    return lambda _: raw


def _filled(tensor: TensorEntry, value: float) -> bytes:
    return encoded(np.full(tensor.shape, value, dtype=np.float32), tensor.dtype)


def _low_precision(tensor: TensorEntry) -> Edit:
    return lambda raw: encoded(rounded_to_e4m3(decoded(raw, tensor.dtype).reshape(tensor.shape)), tensor.dtype)


def _noisy(tensor: TensorEntry, noise: float, seed: int) -> Edit:
    """The same noise at every version: a router that is wrong, not one that is restless."""

    def edit(raw: bytes) -> bytes:
        values = decoded(raw, tensor.dtype)
        drawn = np.random.default_rng([seed, crc32(tensor.name.encode())]).standard_normal(values.size)
        return encoded((values + noise * float(values.std()) * drawn).astype(np.float32), tensor.dtype)

    return edit
