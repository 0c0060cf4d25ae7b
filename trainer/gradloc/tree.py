"""The depth-first search of a binary segment tree for all leaves over a threshold. Layer 3 of diagnosis. It knows no
gradient, no token and no rank.

    pop a segment -> norms of both halves -> leaves over the threshold are hits; halves over it are pushed, the larger
    one last

A half that is in doubt, or not measured yet, waits until its sibling has been searched: a hit there often ends the
search, and then nobody asks.

Which half is next follows from norms alone, so ranks that see the same norms take the same way. Source: GradLoc (Huang
et al., 2026), token level.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

KAPPA = 16.0
"""Norms by subtraction are off by at most this x eps x |parent|."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Leaves start to end, end exclusive."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Number of leaves."""
        return self.end - self.start

    def halves(self) -> tuple["Segment", "Segment"]:
        """Left and right; of an odd number the left one has one more."""
        middle = (self.start + self.end + 1) // 2
        return Segment(self.start, middle), Segment(middle, self.end)


class Probe(Protocol):
    """Measures the gradient of a segment."""

    def cost(self, segment: Segment) -> int:
        """Passes (forward and backward) that `norm` will take."""
        ...

    def norm(self, segment: Segment) -> float:
        """L2 norm of the gradient of the segment's terms."""
        ...


class Subtraction(Protocol):
    """Gradients that are additive: the sibling's is what the child leaves of the parent's. One held gradient is all it
    may cost."""

    @property
    def eps(self) -> float:
        """Rounding of the numbers that compute."""
        ...

    def holds(self, segment: Segment) -> bool:
        """Whether `hold` takes no pass."""
        ...

    def hold(self, segment: Segment) -> None:
        """Keep the segment's gradient as the parent; a pass of its own where it is not at hand."""
        ...

    def remainder(self, sibling: Segment) -> float:
        """|held - last measured|: the norm of the sibling of what `norm` measured last."""
        ...

    def descend(self, child: Segment, *, measured: bool) -> None:
        """Hold a child instead: the one measured last, or what it leaves of the parent."""
        ...


class PassBudget:
    """Counts passes, and ends the search before they are more than allowed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.reserved = 0
        """Passes kept back for what follows a hit."""
        self.refused = False
        """Whether something was not done for want of passes."""

    def spend(self, passes: int) -> bool:
        """Take passes if the budget has them."""
        if self.used + self.reserved + passes > self.limit:
            self.refused = True
            return False
        self.used += passes
        return True


@dataclass(frozen=True, slots=True)
class Hit:
    """One leaf over its threshold."""

    leaf: int
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicate:
    """When a segment is suspicious: above its threshold, or not finite."""

    threshold: Callable[[Segment], float]
    """Of the norm; not asked where `non_finite`."""
    non_finite: bool = False

    def fires(self, norm: float, segment: Segment) -> bool:
        """Whether the segment is searched further."""
        return not math.isfinite(norm) if self.non_finite else not norm <= self.threshold(segment)


@dataclass(frozen=True, slots=True)
class _Measured:
    segment: Segment
    norm: float
    """Perhaps only the least that it can be."""
    sure: bool = True
    """False: not measured, or a subtraction could not decide whether it is suspicious."""


class TreeSearch:
    """One search over `num_leaves` leaves; the root counts as suspicious and is not measured."""

    def __init__(
        self,
        probe: Probe,
        predicate: Predicate,
        num_leaves: int,
        budget: PassBudget,
        subtraction: Subtraction | None = None,
        root_norm: float = math.nan,
    ) -> None:
        """A subtraction saves one pass a split; None measures both halves. A search for what is not finite never
        subtracts.

        Args:
            root_norm: of the root, where it is known: of two halves of which one is small the other then need not be
                measured.
        """
        self._probe, self._predicate, self._budget = probe, predicate, budget
        self._subtraction = None if predicate.non_finite else subtraction
        self._stack = [_Measured(Segment(0, num_leaves), root_norm)] if num_leaves > 0 else []
        self._last: Segment | None = None
        """What the probe measured last in this search."""
        self._held_error: tuple[Segment, float] | None = None
        """A held gradient that came by subtraction, perhaps more than once, and how far it may be off."""
        self._pair_error: float | None = None
        """The same for the half that the last split did not measure; None where it subtracted nothing."""
        self.left: list[Segment] = []
        """Suspicious segments that the budget left unsearched."""
        self.measured_leaves: set[int] = set()
        """Leaves whose own norm is known."""

    def hits(self) -> Iterator[Hit]:
        """Leaves over the threshold, as they are found; between two of them the caller may do as it likes with the
        probe."""
        while self._stack:
            parent = self._stack.pop()
            segment = parent.segment
            if segment.size == 1:
                yield from self._leaf(segment)
                continue
            if not parent.sure:
                if not self._budget.spend(self._probe.cost(segment)):
                    self._leave(segment)
                    return
                parent = _Measured(segment, self._probe.norm(segment))
                if not self._predicate.fires(parent.norm, segment):
                    continue
            halves = self._split(parent)
            if halves is None:
                self._leave(segment)
                return
            sure = [half for half in halves if half.sure]
            firing = [half for half in sure if self._predicate.fires(half.norm, half.segment)]
            self.measured_leaves.update(half.segment.start for half in sure if half.segment.size == 1)
            inner = sorted((half for half in firing if half.segment.size > 1), key=_size_of_norm)
            self._stack += [half for half in halves if not half.sure] + inner
            self._hold_next(inner[-1].segment if inner else None)
            yield from [Hit(half.segment.start, half.norm) for half in firing if half.segment.size == 1]

    def _leaf(self, segment: Segment) -> Iterator[Hit]:
        """A leaf on the stack: in doubt, or a tree of one leaf."""
        if not self._budget.spend(self._probe.cost(segment)):
            self._leave(segment)
            return
        norm = self._probe.norm(segment)
        self.measured_leaves.add(segment.start)
        if self._predicate.fires(norm, segment):
            yield Hit(segment.start, norm)

    def _leave(self, segment: Segment) -> None:
        self.left = [segment, *(waiting.segment for waiting in reversed(self._stack))]
        self._stack = []

    def _split(self, parent: _Measured) -> tuple[_Measured, _Measured] | None:
        left, right = parent.segment.halves()
        held = self._subtraction
        if held is not None and held.holds(parent.segment):
            return self._split_by_subtraction(held, parent.segment, left, right)
        self._pair_error = None
        if self._predicate.non_finite:
            return self._split_non_finite(left, right)
        if held is not None:
            return self._split_by_left(held, parent, left, right)
        if not self._budget.spend(self._probe.cost(left) + self._probe.cost(right)):
            return None
        return _Measured(left, self._probe.norm(left)), _Measured(right, self._probe.norm(right))

    def _split_by_left(
        self, held: Subtraction, parent: _Measured, left: Segment, right: Segment
    ) -> tuple[_Measured, _Measured] | None:
        """Where the left half is suspicious the right one can wait; where it is not, the right one has at least what
        the left leaves of the parent's norm."""
        if not self._budget.spend(self._probe.cost(left)):
            return None
        first = self._probe.norm(left)
        held.hold(left)
        if self._predicate.fires(first, left):
            return _Measured(left, first), _Measured(right, math.nan, sure=False)
        least = parent.norm - first
        if right.size > 1 and least > self._predicate.threshold(right):
            return _Measured(left, first), _Measured(right, least)
        if not self._budget.spend(self._probe.cost(right)):
            return None
        return _Measured(left, first), _Measured(right, self._probe.norm(right))

    def _split_non_finite(self, left: Segment, right: Segment) -> tuple[_Measured, _Measured] | None:
        """A sum of finite parts is finite: where the left half is, the right one need not be measured unless it is a
        leaf."""
        if not self._budget.spend(self._probe.cost(left)):
            return None
        first = self._probe.norm(left)
        if math.isfinite(first) and right.size > 1:
            return _Measured(left, first), _Measured(right, math.nan)
        if not self._budget.spend(self._probe.cost(right)):
            return None
        return _Measured(left, first), _Measured(right, self._probe.norm(right))

    def _split_by_subtraction(
        self, held: Subtraction, parent: Segment, left: Segment, right: Segment
    ) -> tuple[_Measured, _Measured] | None:
        if not self._budget.spend(self._probe.cost(left)):
            return None
        held.hold(parent)
        first, self._last = self._probe.norm(left), left
        rest = held.remainder(right)
        # |parent| is at most the sum of its parts.
        inherited = self._held_error[1] if self._held_error is not None and self._held_error[0] == parent else 0.0
        self._pair_error = inherited + KAPPA * held.eps * (first + rest)
        # Only where the error could change the answer is the sibling measured for itself, and at once only where the
        # search could not go on without it.
        if not abs(rest - self._predicate.threshold(right)) > self._pair_error:
            if self._predicate.fires(first, left):
                return _Measured(left, first), _Measured(right, rest, sure=False)
            if not self._budget.spend(self._probe.cost(right)):
                return None
            rest, self._last = self._probe.norm(right), right
        return _Measured(left, first), _Measured(right, rest)

    def _hold_next(self, following: Segment | None) -> None:
        if self._subtraction is None or following is None:
            return
        if self._pair_error is None:
            if self._subtraction.holds(following):
                self._subtraction.hold(following)
            self._held_error = None
        else:
            measured = following == self._last
            self._subtraction.descend(following, measured=measured)
            self._held_error = None if measured else (following, self._pair_error)


def _size_of_norm(half: _Measured) -> float:
    return half.norm if math.isfinite(half.norm) else math.inf
