"""What every clip with a memory has in common: norms of blocks in, scales out, and a state that a checkpoint can hold.
It knows no tensor."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from rollout.errors import ConcordError, UserError

ClipState = Mapping[str, Any]
"""JSON; its `type` is that of the clip's config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipDecision:
    """What to do with one step's gradient, block by block."""

    scales: tuple[float, ...]
    """[blocks] factor in [0, 1] of each block's gradient."""
    thresholds: tuple[float | None, ...]
    """[blocks] norm at which each block is clipped; None where the block has no threshold of its own, or none yet."""


class Clip(Protocol):
    """A deterministic state machine: equal norms in equal order give equal scales, on every rank."""

    def decide(self, norms: Sequence[float]) -> ClipDecision:
        """The scales of this step; remembers the norms. Called once for each step that is applied, and for no other.

        Args:
            norms: [blocks] L2 norm of each block's gradient, finite.

        Raises:
            ConcordError: a norm is not finite or there is not one a block.
        """
        ...

    def state_dict(self) -> ClipState:
        """Everything that it remembers, as JSON."""
        ...

    def load_state_dict(self, state: ClipState) -> None:
        """Put back what `state_dict` gave.

        Raises:
            UserError: the state is of other blocks.
        """
        ...


def foresee(clip: Clip, norms: Sequence[float]) -> ClipDecision:
    """What `clip` would decide on these norms; it remembers nothing of them."""
    return copy.deepcopy(clip).decide(norms)


class NoMemoryClip:
    """The clip by the global norm alone, which the optimizer applies after every clip: it scales nothing here."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def decide(self, norms: Sequence[float]) -> ClipDecision:
        refuse_bad_norms(self._names, norms)
        return ClipDecision(scales=(1.0,) * len(norms), thresholds=(None,) * len(norms))

    def state_dict(self) -> ClipState:
        return {"type": "global"}

    def load_state_dict(self, state: ClipState) -> None:
        del state


def refuse_bad_norms(names: Sequence[str], norms: Sequence[float]) -> None:
    """One finite norm a block.

    Raises:
        ConcordError: otherwise: such a step must not be applied, so no clip may learn from it.
    """
    if len(norms) != len(names):
        raise ConcordError(f"got {len(norms)} norms for {len(names)} blocks; give one a block, in their order")
    for name, norm in zip(names, norms, strict=True):
        if not (math.isfinite(norm) and norm >= 0):
            raise ConcordError(
                f"got norm {norm} of block {name}, expected a finite one; skip the step instead of clipping it"
            )


def global_norm(norms: Sequence[float]) -> float:
    """L2 norm of the whole gradient, from the norms of its blocks."""
    return math.sqrt(math.fsum(norm * norm for norm in norms))


class BlockClip(ABC):
    """A clip whose every block has a reference of its own, a mean over the norms of its past; None until it has one."""

    kind: ClassVar[str]

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._references: list[float | None] = [None] * len(self._names)

    def decide(self, norms: Sequence[float]) -> ClipDecision:
        refuse_bad_norms(self._names, norms)
        decided = [self._block(block, norm) for block, norm in enumerate(norms)]
        return ClipDecision(
            scales=tuple(scale for scale, _ in decided), thresholds=tuple(threshold for _, threshold in decided)
        )

    def state_dict(self) -> ClipState:
        return {"type": self.kind, "references": dict(zip(self._names, self._references, strict=True))}

    def load_state_dict(self, state: ClipState) -> None:
        stored: Mapping[str, float | None] = state["references"]
        if odd := sorted(set(stored) ^ set(self._names)):
            raise UserError(
                f"the clip's state is of other blocks ({odd[0]} is on one side only); resume from a checkpoint of this "
                "model"
            )
        self._references = [stored[name] for name in self._names]

    @abstractmethod
    def _block(self, block: int, norm: float) -> tuple[float, float | None]:
        """Scale and threshold of a block in this step; learns its norm."""
