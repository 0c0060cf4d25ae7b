"""Loads published tensors into live parameters, one at a time, and digests the bytes that arrived. It knows no
request."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from rollout.errors import EngineError, boundary
from rollout.published.digests import manifest_digest
from rollout.published.tensor_files import weight_files
from rollout.types.weights import TensorEntry, Transport, WeightManifest

_EXPERT = re.compile(r"^(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight$")


class WeightLoader:
    """Fills every parameter of one model from safetensors files, or says which did not arrive."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._state: dict[str, Tensor] = dict(model.state_dict(keep_vars=True))
        self._ignored = [
            re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        ]

    @torch.no_grad()
    def receive(self, manifest: WeightManifest) -> str:
        """Load every tensor of the manifest's directory; the digest of the bytes received.

        Raises:
            EngineError: a file cannot be read, a tensor has no place or another shape, or a parameter did not arrive.
                Some parameters may then be new and others old: the model must not sample any more.
        """
        if manifest.transport is not Transport.DISK:
            raise EngineError(
                f"got weights by transport {manifest.transport.value}; the torch engine takes disk: set "
                "weights.transport = 'disk'"
            )
        missing = {id(tensor): tensor.numel() for tensor in self._state.values()}
        entries: list[TensorEntry] = []
        seen: set[str] = set()
        with boundary(EngineError, f"weights {manifest.policy.key} in {manifest.location}"):
            for name, dtype, tensor in _tensors(Path(manifest.location)):
                if name in seen:
                    raise EngineError(f"tensor {name} is in two files of {manifest.location}; publish it once")
                seen.add(name)
                digest = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
                entries.append(TensorEntry(name=name, dtype=dtype, shape=tuple(tensor.shape), sha256=digest))
                if not any(pattern.search(name) for pattern in self._ignored):
                    self._fill(name, tensor, missing)
        self._refuse_gaps(missing, manifest)
        return manifest_digest(entries)

    def _fill(self, name: str, tensor: Tensor, missing: dict[int, int]) -> None:
        """Fill a parameter or its part; `missing` elements of each parameter (by identity) have not arrived yet."""
        place, key = self._place(name)
        if place.shape != tensor.shape:
            raise EngineError(f"tensor {name} has shape {tuple(tensor.shape)}; the model has {tuple(place.shape)}")
        if not missing[key]:
            # The second name of a tied parameter, or a name twice: harmless only when it says the same.
            if not torch.equal(place, tensor.to(place.device, place.dtype)):
                raise EngineError(
                    f"tensor {name} arrived after another name of the same parameter, with other values; publish tied "
                    "parameters once"
                )
            return
        if place.numel() > missing[key]:
            raise EngineError(
                f"tensor {name} overlaps tensors that arrived before it; publish experts either one by one or stacked"
            )
        place.copy_(tensor)
        missing[key] -= place.numel()

    def _place(self, name: str) -> tuple[Tensor, int]:
        """The (part of a) parameter that a published name fills, and the parameter's identity.

        Experts are published one by one and live in two stacked parameters: gate above up, and down.
        """
        whole = self._state.get(name)
        if whole is not None:
            return whole, id(whole)
        match = _EXPERT.match(name)
        if match is not None:
            down = match["part"] == "down_proj"
            stacked = self._state.get(f"{match['experts']}.{'down_proj' if down else 'gate_up_proj'}")
            if stacked is not None and int(match["index"]) < stacked.shape[0]:
                expert = stacked[int(match["index"])]
                half = expert.shape[0] // 2
                return expert if down else expert[:half] if match["part"] == "gate_proj" else expert[half:], id(stacked)
        raise EngineError(
            f"tensor {name} has no place in the model; expected names such as {', '.join(sorted(self._state)[:3])}"
        )

    def _refuse_gaps(self, missing: dict[int, int], manifest: WeightManifest) -> None:
        gaps = sorted(name for name, tensor in self._state.items() if missing[id(tensor)])
        if gaps:
            raise EngineError(
                f"weights {manifest.policy.key} in {manifest.location} lack {len(gaps)} of {len(self._state)} "
                f"parameters: {', '.join(gaps[:4])}; publish every parameter"
            )


def _tensors(directory: Path) -> Iterator[tuple[str, str, Tensor]]:
    """(name, safetensors dtype, tensor) of every safetensors file in a directory, one tensor in memory at a time."""
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118 - the reader is no mapping
                yield name, reader.get_slice(name).get_dtype(), reader.get_tensor(name).contiguous()
