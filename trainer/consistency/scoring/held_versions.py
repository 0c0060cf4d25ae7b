"""Which published weights the scorer holds, and the one module that computes with any of them.

The module's parameters are pointers: putting another version into it costs about nothing, and a held version costs the
bytes of its weights. It owns reading, keeping and forgetting versions; it knows no trajectory.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rollout.errors import ConcordError, UserError, WeightSyncError, boundary
from rollout.published.manifest import MANIFEST_NAME, read_manifest
from rollout.published.tensor_files import weight_files
from rollout.types.weights import PolicyVersion, WeightManifest
from trainer.consistency.checks.step import Moved, moved_together
from trainer.model.loading import DTYPES, meta_model, rebuild_transient_buffers, refuse_mismatch
from trainer.model.policy_model import PolicyModel
from trainer.model.tensor_layout import TensorLayout, modules_of, stored_tensors, transient_buffers

_BASE = "v0"


class VersionGoneError(ConcordError):
    """A version is neither held nor published (any more, or yet)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldWeights:
    """One version in memory."""

    digest: str
    """Digest in its manifest; empty for version 0, which is read from the model directory."""
    tensors: Mapping[str, Tensor]
    """What a checkpoint holds, by the model's names, a tied tensor once: parameters in the compute dtype, buffers in
    their own."""

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class HeldVersions:
    """Version 0 always, and of the others the `max_versions` that were used last. Not for two threads at once."""

    def __init__(
        self, model_dir: Path, weights_dir: Path, dtype: str, chunk_tokens: int, max_versions: int, device: torch.device
    ) -> None:
        """Build the module and load version 0 from `model_dir`, whatever the trainer epoch.

        Args:
            weights_dir: holds the published directories `eE-vN`.
            dtype: the trainer's compute dtype, `float32` or `bfloat16`.
            chunk_tokens: tokens whose logits exist at once.
            max_versions: held besides version 0.

        Raises:
            UserError: `model_dir` does not hold what its config says.
        """
        self._weights_dir, self._max_versions, self.device = weights_dir, max_versions, device
        self.dtype = DTYPES[dtype]
        self.model = PolicyModel(meta_model(model_dir), chunk_tokens)
        causal_lm = self.model.causal_lm
        self._layout = TensorLayout(causal_lm)
        rebuild_transient_buffers(causal_lm, self.model.architecture)
        for _, module in modules_of(causal_lm):
            transient = transient_buffers(module)
            for name, buffer in module.named_buffers(recurse=False):
                if name in transient:
                    module.register_buffer(name, buffer.to(device), persistent=False)
        self.model.eval().requires_grad_(False)
        self._slots = _slots_of(causal_lm)
        self._base = HeldWeights(digest="", tensors=self._read(model_dir, weight_files(model_dir)))
        self._held: dict[PolicyVersion, HeldWeights] = {}
        self._active = self._base
        self._assign(self._base.tensors)

    @property
    def held(self) -> dict[str, str]:
        """Key of each held version -> digest of its weights; the one used last stands last. Version 0 is `v0`."""
        return {_BASE: self._base.digest} | {policy.key: weights.digest for policy, weights in self._held.items()}

    @property
    def held_bytes(self) -> int:
        """Memory of all held versions."""
        return self._base.num_bytes + sum(weights.num_bytes for weights in self._held.values())

    def holds(self, policy: PolicyVersion) -> bool:
        """Whether `policy` can be used without reading."""
        return policy.version == 0 or policy in self._held

    def activate(self, policy: PolicyVersion) -> None:
        """Put the weights of `policy` into the model; if that fails, the model keeps complete weights of some version.

        Raises:
            VersionGoneError: its directory is not there, or was removed while it was read.
            WeightSyncError: the directory contradicts itself.
            UserError: it holds the weights of another model.
        """
        weights = self._base if policy.version == 0 else self._held.pop(policy, None)
        if weights is None:
            weights = self._load(policy)
        if policy.version != 0:
            self._held[policy] = weights
        if weights is not self._active:
            self._active = weights
            self._assign(weights.tensors)

    @contextmanager
    def converted(self, convert: Callable[[str, Tensor], Tensor]) -> Generator[None]:
        """The active version with other values or dtypes: `convert(name, parameter)`. The copies live as long as the
        context; buffers stay."""
        self._assign(
            {
                name: _frozen(convert(name, t)) if isinstance(t, nn.Parameter) else t
                for name, t in self._active.tensors.items()
            }
        )
        try:
            yield
        finally:
            self._assign(self._active.tensors)

    def moved(self, before: PolicyVersion, after: PolicyVersion, decayed: float) -> dict[str, Moved]:
        """How far each transformer block, and each parameter outside of them, moved from one version to another.

        Args:
            decayed: share of a weight that decay may take, which `Moved.most` leaves out.

        Raises:
            VersionGoneError: one of the two is not there.
        """
        parts: dict[str, list[Moved]] = {}
        blocks = tuple(self.model.named_blocks())
        self.activate(before)
        old = self._active.tensors
        self.activate(after)
        for name, new in self._active.tensors.items():
            if isinstance(new, nn.Parameter):
                was = old[name].detach().float()
                difference = (new.detach().float() - was).abs()
                parts.setdefault(next((b for b in blocks if name.startswith(f"{b}.")), name), []).append(
                    Moved(
                        num_parameters=new.numel(),
                        square=float(difference.double().square().sum()),
                        most=float((difference - decayed * was.abs()).max()) if new.numel() else 0.0,
                    )
                )
        return {name: moved_together(each) for name, each in parts.items()}

    def shifted(self, policy: PolicyVersion, offset: int) -> PolicyVersion:
        """The policy `offset` versions later in the same lineage: a version that the epoch itself did not publish is an
        older epoch's.

        Raises:
            VersionGoneError: the version would be negative.
        """
        version = policy.version + offset
        if version < 0:
            raise VersionGoneError(f"there is no version {version}: {policy.key} was asked for with offset {offset}")
        lineage = [
            PolicyVersion(epoch, version)
            for epoch in range(policy.trainer_epoch, 0 if offset else policy.trainer_epoch - 1, -1)
        ]
        return next(
            (p for p in lineage if self.holds(p) or (self._weights_dir / p.key / MANIFEST_NAME).is_file()), lineage[0]
        )

    def _load(self, policy: PolicyVersion) -> HeldWeights:
        """Read a published directory; what is removed meanwhile is gone, and nothing else takes its place."""
        directory = self._weights_dir / policy.key
        try:
            manifest = read_manifest(directory)
            if manifest.policy != policy:
                raise WeightSyncError(
                    f"{directory} holds {manifest.policy.key}, expected {policy.key}; it was moved: publish again"
                )
            self._make_room()
            return HeldWeights(
                digest=manifest.digest, tensors=self._read(directory, sorted(directory.glob("*.safetensors")), manifest)
            )
        except (OSError, ConcordError) as error:
            if _file_was_missing(error):
                raise VersionGoneError(
                    f"weights {policy.key} are not in {self._weights_dir}: not published yet, or removed"
                ) from error
            raise

    def _make_room(self) -> None:
        while len(self._held) >= self._max_versions:
            dropped = self._held.pop(next(iter(self._held)))
            if dropped is self._active:
                self._active = self._base
                self._assign(self._base.tensors)

    def _read(
        self, directory: Path, files: Sequence[Path], manifest: WeightManifest | None = None
    ) -> dict[str, Tensor]:
        """The tensors of a directory, in memory of their own: the files may go as soon as they are open."""
        with ExitStack() as stack:
            readers: dict[str, Any] = {}
            for path in files:
                reader = cast(Any, stack.enter_context(safe_open(path, framework="pt")))
                readers |= dict.fromkeys(cast(list[str], reader.keys()), reader)
            if manifest is not None and (missing := {tensor.name for tensor in manifest.tensors} - readers.keys()):
                raise FileNotFoundError(f"{directory} lacks {min(missing)}, which its manifest names")
            sources, unknown = self._layout.sources(readers)
            refuse_mismatch(self.model, directory, set(sources), unknown)
            tensors: dict[str, Tensor] = {}
            for name, tensor in stored_tensors(self.model.causal_lm):
                with boundary(UserError, f"cannot load {name} from {directory}"):
                    whole = self._layout.assemble(
                        name, sources[name], lambda stored: readers[stored].get_tensor(stored)
                    )
                if whole.shape != tensor.shape:
                    raise UserError(
                        f"{directory}: {name} has shape {tuple(whole.shape)}, expected {tuple(tensor.shape)} by "
                        "config.json"
                    )
                if isinstance(tensor, nn.Parameter):
                    tensors[name] = _frozen(whole.to(self.device, self.dtype, copy=True))
                else:
                    tensors[name] = whole.to(self.device, tensor.dtype, copy=True)
        return tensors

    def _assign(self, tensors: Mapping[str, Tensor]) -> None:
        for module, own_name, name in self._slots:
            setattr(module, own_name, tensors[name])


def _slots_of(model: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """(module, name in the module, name in a checkpoint) of every parameter and persistent buffer; tied parameters
    share the last."""
    first: dict[int, str] = {}
    slots: list[tuple[nn.Module, str, str]] = []
    for path, module in modules_of(model):
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            slots.append((module, name, first.setdefault(id(parameter), prefix + name)))
        transient = transient_buffers(module)
        slots += [
            (module, name, prefix + name) for name, _ in module.named_buffers(recurse=False) if name not in transient
        ]
    return slots


def _frozen(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)


def _file_was_missing(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, FileNotFoundError):
            return True
        error = error.__cause__
    return False
