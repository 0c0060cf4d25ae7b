"""The depth-first search of a binary segment tree for all leaves over a threshold. Layer 3 of diagnosis. It knows no
gradient, no token and no rank.

    pop a segment -> norms of both halves -> leaves over the threshold are hits; halves over it are pushed, the larger
    one last

Which half is next follows from norms alone, so ranks that see the same norms take the same way. Source: GradLoc (Huang
et al., 2026), token level.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Segment:
    """Leaves start to end, end exclusive."""

    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def halves(self) -> tuple["Segment", "Segment"]:
        """Left and right; of an odd number the left one has one more."""
        middle = (self.start + self.end + 1) // 2
        return Segment(self.start, middle), Segment(middle, self.end)


class Leaves(Protocol):
    """What is searched: measures the gradient of a segment, and says which norm is suspicious."""

    @property
    def num_leaves(self) -> int:
        """Number of all."""
        ...

    def cost(self, segment: Segment) -> int:
        """Passes (forward and backward) that `norm` will take."""
        ...

    def norm(self, segment: Segment) -> float:
        """L2 norm of the gradient of the segment's terms."""
        ...

    def fires(self, norm: float, segment: Segment) -> bool:
        """Whether the segment is searched further: above its threshold, or not finite."""
        ...


class PassBudget:
    """Counts passes, and ends the search before they are more than allowed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.reserved = 0
        """Passes kept back for what follows a hit."""
        self.refused = False
        """Whether something was not done, for want of passes or because it was not asked for."""

    def spend(self, passes: int) -> bool:
        if self.used + self.reserved + passes > self.limit:
            self.refuse()
            return False
        self.used += passes
        return True

    def reserve(self, passes: int) -> None:
        """Keep so many back from now on."""
        self.reserved = passes

    def refuse(self) -> None:
        self.refused = True


@dataclass(frozen=True, slots=True)
class Hit:
    """One leaf over its threshold."""

    leaf: int
    norm: float


class TreeSearch:
    """One search; the root counts as suspicious and is not measured."""

    def __init__(self, leaves: Leaves, budget: PassBudget, *, non_finite: bool = False) -> None:
        """`non_finite`: what is not finite fires. A sum of finite parts is finite, so of a pair whose left half is, the
        right one need not be measured unless it is a leaf."""
        self._leaves, self._budget, self._non_finite = leaves, budget, non_finite
        self._stack: list[Segment] = [Segment(0, leaves.num_leaves)] if leaves.num_leaves else []
        self.measured_leaves: set[int] = set()
        """Leaves whose own norm is known."""

    @property
    def left(self) -> list[Segment]:
        """Suspicious segments that are not searched yet, the next one first."""
        return self._stack[::-1]

    def hits(self) -> Iterator[Hit]:
        """Leaves over the threshold, as they are found, until the budget refuses; between two of them the caller may do
        as it likes with the probe."""
        while self._stack:
            segment = self._stack[-1]
            parts = segment.halves() if segment.size > 1 else (segment,)
            measured = self._measured(parts)
            if not measured:
                return
            self._stack[-1:] = parts[len(measured) :]
            self.measured_leaves.update(part.start for part, _ in measured if part.size == 1)
            firing = [(part, norm) for part, norm in measured if self._leaves.fires(norm, part)]
            inner = sorted(firing, key=lambda one: size_of_norm(one[1]))
            self._stack += [part for part, _ in inner if part.size > 1]
            yield from [Hit(part.start, norm) for part, norm in firing if part.size == 1]

    def _measured(self, parts: tuple[Segment, ...]) -> list[tuple[Segment, float]]:
        """Norms of these parts of a suspicious segment, as far as the budget goes: of all or none, unless one alone
        tells where something is not finite."""
        if not self._non_finite:
            affordable = self._budget.spend(sum(self._leaves.cost(part) for part in parts))
            return [(part, self._leaves.norm(part)) for part in parts] if affordable else []
        measured: list[tuple[Segment, float]] = []
        for part in parts:
            if measured and math.isfinite(measured[0][1]) and part.size > 1:
                measured.append((part, math.nan))
            elif self._budget.spend(self._leaves.cost(part)):
                measured.append((part, self._leaves.norm(part)))
            else:
                break
        return measured


def size_of_norm(norm: float) -> float:
    """What is not finite is larger than anything."""
    return norm if math.isfinite(norm) else math.inf
