"""The current weights become a complete model directory with a manifest, gathered tensor by tensor. It knows no
engine."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollout.errors import UserError, boundary
from rollout.published.digests import manifest_digest
from rollout.published.manifest import write_manifest
from rollout.types.weights import Canary, PolicyVersion, TensorEntry, Transport, WeightManifest
from trainer.checkpointing.durable import begin_directory, complete_directory
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, local_tensor
from trainer.model.tensor_layout import TensorLayout, stored_tensors

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
_STATIC_FILES = (
    "*config.json",
    "tokenizer*",
    "special_tokens*",
    "added_tokens*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """One written weight file."""

    path: Path
    entries: tuple[TensorEntry, ...]
    num_bytes: int


class WeightWriter:
    """Writes published directories; one lives as long as its trainer."""

    def __init__(
        self,
        model: PolicyModel,
        layout: TensorLayout,
        model_dir: Path,
        *,
        dtype: torch.dtype,
        shard_bytes: int,
        ranks: Ranks,
    ) -> None:
        self._model, self._layout, self._model_dir = model, layout, model_dir
        self._dtype, self._shard_bytes, self._ranks = dtype, shard_bytes, ranks
        self._linked_from: Path | None = None
        self.order: dict[str, int] = {}
        """On rank 0: place of each tensor in the order in which `whole_tensors` yields them, once something was
        published."""

    def write(self, policy: PolicyVersion, directory: Path, canary: Callable[[], Canary]) -> WeightManifest | None:
        """Write `directory`; rank 0 returns its manifest, the others None. Collective.

        Args:
            canary: computes the trainer's own log-probs of the canary; collective.

        Raises:
            UserError: the directory exists or cannot be written.
        """
        temporary = self._ranks.of_first(lambda: begin_directory(directory))
        shards = self._write_shards(temporary)
        answered = canary()
        if temporary is None:
            self._ranks.agree()
            return None
        written = [entry for shard in shards for entry in shard.entries]
        self.order = {entry.name: place for place, entry in enumerate(written)}
        entries = tuple(sorted(written, key=lambda entry: entry.name))
        manifest = WeightManifest(
            policy=policy,
            transport=Transport.DISK,
            location=str(directory),
            tensors=entries,
            digest=manifest_digest(entries),
            canary=answered,
            num_bytes=sum(shard.num_bytes for shard in shards),
        )
        self._finish(temporary, directory, manifest, shards)
        self._ranks.agree()
        return manifest

    def _write_shards(self, temporary: Path | None) -> list[_Shard]:
        shards: list[_Shard] = []
        pending: dict[str, Tensor] = {}
        size = 0
        for name, tensor in self._tensors_to_write():
            num_bytes = tensor.numel() * tensor.element_size()
            if pending and size + num_bytes > self._shard_bytes:
                shards.append(_save_shard(cast(Path, temporary), len(shards), pending))
                pending, size = {}, 0
            pending[name] = tensor
            size += num_bytes
        if temporary is not None:
            shards.append(_save_shard(temporary, len(shards), pending))
        return shards

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint name and tensor of everything published, on every rank and where the model lives. Collective."""
        for name, whole in self._gathered():
            yield from ((stored, part.contiguous()) for stored, part in self._layout.stored_form(name, whole).items())

    def _tensors_to_write(self) -> Iterator[tuple[str, Tensor]]:
        """The same on the CPU, on rank 0 only; the others take part in the gathering and see none."""
        for name, whole in self._gathered():
            if self._ranks.first:
                for stored, part in self._layout.stored_form(name, whole).items():
                    yield stored, part.cpu().contiguous()

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad():
            yield from ((name, self._whole(tensor).detach()) for name, tensor in stored_tensors(self._model.causal_lm))

    def _whole(self, tensor: Tensor) -> Tensor:
        """A parameter in the published dtype, gathered; a buffer as it is."""
        if not isinstance(tensor, DTensor):
            return tensor.to(self._dtype) if isinstance(tensor, torch.nn.Parameter) else tensor
        if self._ranks.world == 1:
            return local_tensor(tensor).to(self._dtype)
        return cast(Tensor, cast(Any, tensor.to(self._dtype)).full_tensor())

    def _finish(self, temporary: Path, directory: Path, manifest: WeightManifest, shards: list[_Shard]) -> None:
        with boundary(UserError, f"cannot write {directory} (free space, or choose another run directory)"):
            _name_shards(temporary, shards)
            linked = self._copy_static_files(temporary)
            write_manifest(temporary, manifest)
        complete_directory(temporary, directory, linked)
        self._linked_from = directory

    def _copy_static_files(self, temporary: Path) -> frozenset[Path]:
        """Copy config and tokenizer; from the second publication on, link the copies of the one before. Returns the
        links."""
        if self._linked_from is not None and self._linked_from.is_dir():
            paths = _static_files(self._linked_from)
            return frozenset(temporary / path.name for path in paths if _link_or_copy(path, temporary / path.name))
        for path in _static_files(self._model_dir):
            shutil.copyfile(path, temporary / path.name)
        self._declare_dtype(temporary / "config.json")
        return frozenset()

    def _declare_dtype(self, path: Path) -> None:
        """Say in the published config which dtype the published weights have."""
        config = cast(dict[str, object], json.loads(path.read_bytes()))
        wanted = str(self._dtype).removeprefix("torch.")
        key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        if config.get(key) != wanted:
            path.write_text(json.dumps(config | {key: wanted}, indent=2, ensure_ascii=False) + "\n")


def _static_files(directory: Path) -> list[Path]:
    """Config and tokenizer of a model directory."""
    return sorted({path for pattern in _STATIC_FILES for path in directory.glob(pattern) if path.is_file()})


def _link_or_copy(source: Path, target: Path) -> bool:
    """Whether it became a link; a file system without links gets a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
        return False
    return True


def _save_shard(temporary: Path, number: int, tensors: dict[str, Tensor]) -> _Shard:
    path = temporary / f"shard-{number}.safetensors"
    with boundary(UserError, f"cannot write weights to {temporary} (free space, or choose another run directory)"):
        cast(Any, safetensors.torch).save_file(tensors, path, metadata={"format": "pt"})
    entries = tuple(tensor_entry(name, tensor) for name, tensor in tensors.items())
    return _Shard(
        path=path, entries=entries, num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    )


def tensor_entry(name: str, tensor: Tensor) -> TensorEntry:
    """Name, dtype, shape and digest of a contiguous CPU tensor."""
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    return TensorEntry(
        name=name,
        dtype=_DTYPE_NAMES[tensor.dtype],
        shape=tuple(tensor.shape),
        sha256=hashlib.sha256(raw.data).hexdigest(),
    )


def _name_shards(temporary: Path, shards: list[_Shard]) -> None:
    """Give the files their Hugging Face names, with an index when there are several."""
    if len(shards) == 1:
        shards[0].path.rename(temporary / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.path.rename(temporary / name)
        weight_map.update({entry.name: name for entry in shard.entries})
    index = {
        "metadata": {"total_size": sum(shard.num_bytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
