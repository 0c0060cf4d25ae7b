"""How a model's parameters and persistent buffers correspond to the tensors of a Hugging Face checkpoint, both ways.

Most names are the same. Some architectures fuse tensors in memory (the experts of a MoE): transformers declares those
conversions, and this module is the only one that touches them. It knows no rank and no file.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

_transformers: Any = core_model_loading
"""Typed only in part by its authors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """Which checkpoint tensors make one tensor of the model."""

    names: tuple[str, ...]
    """Checkpoint names, in the order in which the conversion takes them."""
    patterns: tuple[str, ...]
    """The conversion's pattern that each name matched; empty when the tensor is stored as it is."""


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything a checkpoint holds: parameters (a tied one once) and persistent buffers."""
    yield from model.named_parameters()
    transient = {
        f"{path}.{name}" if path else name for path, module in modules_of(model) for name in transient_buffers(module)
    }
    for name, buffer in model.named_buffers():
        if name not in transient:
            yield name, buffer


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module, the model itself first."""
    return list(cast(Iterable[tuple[str, nn.Module]], cast(Any, model).named_modules()))


def transient_buffers(module: nn.Module) -> set[str]:
    """Names of the module's own buffers that no checkpoint holds."""
    return cast(set[str], getattr(module, "_non_persistent_buffers_set", set[str]()))


class TensorLayout:
    """The correspondence for one model; built while its parameters may still be on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._conversions = list(cast(Iterable[Any], get_model_conversion_mapping(cast(Any, model), add_legacy=False)))
        self._converters = [c for c in self._conversions if isinstance(c, WeightConverter)]
        self._renamings = [c for c in self._conversions if isinstance(c, WeightRenaming)]
        self._known = dict.fromkeys(model.state_dict(), True)
        self._remember()

    def sources(self, checkpoint_names: Iterable[str]) -> tuple[dict[str, TensorSource], tuple[str, ...]]:
        """For each tensor of the model the checkpoint tensors that make it, and the checkpoint names that nothing asked
        for.

        A tied tensor that the checkpoint stores under its other name is found under its first.
        """
        known = {name for name, _ in stored_tensors(self._model)}
        aliases = _aliases(self._model)
        names: dict[str, list[tuple[str, str]]] = {}
        unknown: list[str] = []
        for stored in sorted(checkpoint_names, key=_natural_key):
            target, pattern = self._target(stored)
            first = aliases.get(target, target)
            if first not in known:
                unknown.append(stored)
            elif target == first or first not in names:
                names.setdefault(first, []).append((stored, pattern or ""))
        # A prefix that the checkpoint did not have must not be put in front of what is published.
        self._conversions = [c for c in self._conversions if not isinstance(c, PrefixChange) or c.was_used()]
        self._remember()
        return {name: _source(pairs, name) for name, pairs in names.items()}, tuple(unknown)

    def assemble(self, name: str, source: TensorSource, read: Callable[[str], Tensor]) -> Tensor:
        """The model's tensor `name` from whole checkpoint tensors."""
        if not source.patterns:
            return read(source.names[0])
        converter: Any = deepcopy(next(c for c in self._converters if source.patterns[0] in c.source_patterns))
        for stored, pattern in zip(source.names, source.patterns, strict=True):
            converter.add_tensor(name, stored, pattern, read(stored))
        made = cast(dict[str, Any], converter.convert(name, model=self._model, config=cast(Any, self._model).config))
        tensor = made[name]
        return cast(Tensor, tensor[0] if isinstance(tensor, list) else tensor)

    def stored_form(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The checkpoint tensors of the model's whole tensor `name`."""
        if not self._conversions:
            return {name: tensor}
        return cast(dict[str, Tensor], _transformers.revert_weight_conversion(self._model, {name: tensor}))

    def _remember(self) -> None:
        # `revert_weight_conversion` looks there for what loading applied.
        cast(Any, self._model)._weight_conversions = self._conversions or None

    def _target(self, stored: str) -> tuple[str, str | None]:
        prefix = cast(str, cast(Any, self._model).base_model_prefix)
        target, pattern = cast(
            tuple[str, str | None],
            _transformers.rename_source_key(stored, self._renamings, self._converters, prefix, self._known),
        )
        if target not in self._known and stored in self._known:
            return stored, None
        return target, pattern


def _source(pairs: list[tuple[str, str]], name: str) -> TensorSource:
    if len(pairs) > 1 and not all(pattern for _, pattern in pairs):
        # Both names of a tied tensor are stored; its own comes first.
        pairs = [next((pair for pair in pairs if pair[0] == name), pairs[0])]
    patterns = tuple(pattern for _, pattern in pairs if pattern)
    return TensorSource(names=tuple(stored for stored, _ in pairs), patterns=patterns)


def _aliases(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters -> the first name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            aliases[name] = known
    return aliases


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Orders numbers in names by value, so that expert 10 comes after expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
