"""From a spiking step to the token terms that did it: suspects, micro-batches, ranks, tokens. Layer 3 of diagnosis.

    suspects (one pass) -> terms that pull hardest (one pass each) -> micro-batches over threshold -> their ranks
    -> their tokens

Each hit is confirmed by what the step's gradient is without it.

What it is without a hit is the step's gradient less the hit's. Where the spike is so large that this difference would
be mostly rounding, the part of the step that held the hit is measured again without it, beside the known norms of the
other parts.

Everything is decided from norms that all ranks share, so all ranks take the same way and run the same passes. It knows
no model: a `StepProbe` measures.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.gradloc.probe.step_terms import NO_TERMS, StepTerms, Terms
from trainer.gradloc.thresholds import set_threshold
from trainer.gradloc.tree import KAPPA, PassBudget, Predicate, Segment, TreeSearch

CARRIES = 0.5
"""Suspects with less than this share of the step's norm do not carry its spike, whatever their own thresholds say."""
EXPLAINED = 0.5
"""Share of the squared norm that hits must take away to count as the cause."""


class Outcome(StrEnum):
    """What becomes of a step that asks for a search."""

    LOCATED = "located"
    """At most `max_hits` tokens, and no more than half of the step's unless it is one, explain at least half of the
    squared norm, and what is left is below its threshold."""
    DIFFUSE = "diffuse"
    """No few tokens dominate."""
    INCONCLUSIVE = "inconclusive"
    """The passes ended before the search did, or only suspects were looked at."""
    CLEAN = "clean"
    """Every token was ruled out."""
    NOT_SEARCHED = "not_searched"
    """The passes that spikes may cost in a hundred steps are spent."""


class StepProbe(Protocol):
    """Measures gradients of chosen terms of a step; the step's own gradient is set aside."""

    @property
    def eps(self) -> float:
        """Rounding of the numbers that compute."""
        ...

    @property
    def additive(self) -> bool:
        """Whether a subtraction may replace a pass."""
        ...

    def cost(self, terms: Terms) -> int:
        """Passes that `norm` will take; 0 for no terms."""
        ...

    def norm(self, terms: Terms) -> float:
        """L2 norm of the gradient of these terms alone, over all ranks."""
        ...

    def rest(self, terms: Terms) -> float:
        """|step's gradient - gradient of these terms|."""
        ...

    def rest_cost(self, terms: Terms) -> int:
        """Passes that `rest` will take: as `cost`, and 0 for what was measured last."""
        ...

    def holds(self, terms: Terms) -> bool:
        """As `Subtraction.holds`."""
        ...

    def hold(self, terms: Terms) -> None:
        """As `Subtraction.hold`."""
        ...

    def remainder(self, sibling: Terms) -> float:
        """As `Subtraction.remainder`."""
        ...

    def descend(self, child: Terms, *, measured: bool) -> None:
        """As `Subtraction.descend`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """What a search may do and from where on it is suspicious."""

    tau: float
    """Norm of one token's gradient, before its weight."""
    budget: int
    """Passes."""
    max_hits: int
    subtract: bool = True
    suspect_factor: float = 1.0
    """In a search of suspects alone their thresholds are this much of the others'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What was found."""

    outcome: Outcome
    hits: tuple[tuple[int, float], ...]
    """(index of the term, norm of its gradient), in the order found."""
    passes: int
    explained: float
    """Share of the squared norm that goes with the hits, at the least; NaN where that was not measured."""


class _Leaves:
    """Leaf i of a tree stands for `terms[offsets[i] : offsets[i + 1]]`."""

    def __init__(self, probe: StepProbe, terms: Terms, offsets: Sequence[int] | NDArray[np.int64]) -> None:
        self._probe, self._terms, self._offsets = probe, terms, offsets
        self.num_leaves = len(offsets) - 1

    @property
    def eps(self) -> float:
        return self._probe.eps

    def of(self, segment: Segment) -> Terms:
        return self._terms[self._offsets[segment.start] : self._offsets[segment.end]]

    def cost(self, segment: Segment) -> int:
        return self._probe.cost(self.of(segment))

    def norm(self, segment: Segment) -> float:
        return self._probe.norm(self.of(segment))

    def holds(self, segment: Segment) -> bool:
        return self._probe.holds(self.of(segment))

    def hold(self, segment: Segment) -> None:
        self._probe.hold(self.of(segment))

    def remainder(self, sibling: Segment) -> float:
        return self._probe.remainder(self.of(sibling))

    def descend(self, child: Segment, *, measured: bool) -> None:
        self._probe.descend(self.of(child), measured=measured)


class StepSearch:
    """One search over one step."""

    def __init__(self, probe: StepProbe, table: StepTerms, limits: SearchLimits, step_norm: float) -> None:
        """`step_norm` is that of the whole step's gradient; not finite, it makes "is not finite" the predicate."""
        self._probe, self._table, self._limits, self._step_norm = probe, table, limits, step_norm
        self._non_finite = not math.isfinite(step_norm)
        self._budget = PassBudget(limits.budget)
        self._hits: dict[int, float] = {}
        self._measured = np.zeros(table.position.size, dtype=np.bool_)
        self._explained, self._rest_fires, self._stopped = math.nan, True, False
        self._left = math.nan
        """The most that the step's norm can be without the hits, where that is below its threshold."""
        self._parts: NDArray[np.float64] | None = None
        """[M, W] norms of the parts without their hits; only where differences could not confirm a hit."""

    def run(
        self,
        suspects: Terms,
        known: NDArray[np.float64] | None = None,
        *,
        likely: Terms = NO_TERMS,
        only_suspects: bool = False,
    ) -> SearchResult:
        """Search until what is left is below its threshold, nothing is left to search, or the passes end.

        Args:
            suspects: terms to try first.
            known: [M, W] norm of each rank's part of each micro-batch, where somebody has them; saves the passes of two
                phases.
            likely: terms in any order, to try next, one by one as they stand, as long as each of them is a hit.
            only_suspects: stop after the suspects.
        """
        if known is not None and not self._non_finite and 2.0 * self._error > self._threshold(self._table.all):
            self._parts = known.copy()
        if suspects.size:
            self._search_suspects(suspects, self._limits.suspect_factor if only_suspects else 1.0)
        if only_suspects:
            self._budget.refused = True  # all others were not looked at
        else:
            self._search_likely(likely)
            if not self._stopped:
                self._search_micro_batches(known if self._parts is None else self._parts)
        if math.isfinite(self._left):
            self._drop_needless_hits()
        return SearchResult(
            outcome=self._outcome(), hits=tuple(self._hits.items()), passes=self._budget.used, explained=self._explained
        )

    @property
    def _error(self) -> float:
        """How far a difference from the step's gradient may be off."""
        return KAPPA * self._probe.eps * self._step_norm

    def _threshold(self, terms: Terms, factor: float = 1.0) -> float:
        return factor * set_threshold(self._limits.tau, self._table.squared_weight(terms))

    def _fires(self, norm: float, terms: Terms, factor: float = 1.0) -> bool:
        return not math.isfinite(norm) if self._non_finite else not norm <= self._threshold(terms, factor)

    def _tree(self, leaves: _Leaves, root_norm: float, factor: float = 1.0) -> TreeSearch:
        predicate = Predicate(
            threshold=lambda segment: self._threshold(leaves.of(segment), factor), non_finite=self._non_finite
        )
        subtracts = self._limits.subtract and self._probe.additive
        return TreeSearch(leaves, predicate, leaves.num_leaves, self._budget, leaves if subtracts else None, root_norm)

    def _search_suspects(self, suspects: Terms, factor: float) -> None:
        if not self._budget.spend(self._probe.cost(suspects)):
            return
        norm = self._probe.norm(suspects)
        fires = self._fires(norm, suspects, factor)
        if suspects.size == 1 and not fires:
            self._measured[suspects] = True
        if not fires or norm < CARRIES * self._step_norm:
            return
        if suspects.size == 1:
            self._found(int(suspects[0]), norm)
        else:
            self._search_tokens(suspects, norm, factor)

    def _search_likely(self, likely: Terms) -> None:
        for term in likely.tolist():
            if self._stopped:
                return
            if term in self._hits or self._measured[term]:
                continue
            alone = np.array([term], dtype=np.int64)
            if not self._budget.spend(self._probe.cost(alone)):
                return
            norm = self._probe.norm(alone)
            self._measured[term] = True
            if not self._fires(norm, alone):
                return
            self._found(term, norm)

    def _search_micro_batches(self, known: NDArray[np.float64] | None) -> None:
        norms: list[float] = []
        for micro_batch in range(self._table.num_micro_batches):
            terms = self._table.of(micro_batch)
            if known is not None:
                norms.append(float(np.max(known[micro_batch])))
            elif self._table.num_micro_batches == 1 and not self._non_finite:
                norms.append(self._step_norm)
            elif self._budget.spend(self._probe.cost(terms)):
                norms.append(self._probe.norm(terms))
            else:
                return
        over = self._over if known is None else self._over_somewhere(known)
        firing = [m for m, norm in enumerate(norms) if over(m, norm)]
        self._budget.reserved = 1  # a hit is worth little unless it is confirmed
        for micro_batch in sorted(
            firing, key=lambda m: (math.isfinite(norms[m]), -norms[m] if math.isfinite(norms[m]) else 0.0)
        ):
            self._search_ranks(micro_batch, norms[micro_batch], known)
            if self._stopped:
                return

    def _over(self, micro_batch: int, norm: float) -> bool:
        return self._fires(norm, self._table.of(micro_batch))

    def _over_somewhere(self, known: NDArray[np.float64]) -> Callable[[int, float], bool]:
        def over(micro_batch: int, norm: float) -> bool:
            return any(
                self._fires(float(known[micro_batch, rank]), self._table.of(micro_batch, rank))
                for rank in range(self._table.world)
            )

        return over

    def _search_ranks(self, micro_batch: int, norm: float, known: NDArray[np.float64] | None) -> None:
        parts = [self._table.of(micro_batch, rank) for rank in range(self._table.world)]
        if known is not None:
            of_ranks = [float(known[micro_batch, rank]) for rank in range(self._table.world)]
            firing = [
                (rank, rank_norm) for rank, rank_norm in enumerate(of_ranks) if self._fires(rank_norm, parts[rank])
            ]
            found = sorted(firing, key=lambda one: -one[1] if math.isfinite(one[1]) else -math.inf)
        else:
            found = [(0, norm)] if self._table.world == 1 else None
        if found is not None:
            for rank, rank_norm in found:
                if not self._stopped:
                    self._search_tokens(parts[rank], rank_norm)
            return
        offsets = np.concatenate(([0], np.cumsum([part.size for part in parts])))
        tree = self._tree(_Leaves(self._probe, self._table.of(micro_batch), offsets), norm)
        for hit in tree.hits():
            self._search_tokens(parts[hit.leaf], hit.norm)
            if self._stopped:
                return

    def _search_tokens(self, terms: Terms, norm: float, factor: float = 1.0) -> None:
        tree = self._tree(_Leaves(self._probe, terms, np.arange(terms.size + 1)), norm, factor)
        for hit in tree.hits():
            if int(terms[hit.leaf]) not in self._hits:
                self._found(int(terms[hit.leaf]), hit.norm)
            if self._stopped:
                break
        self._measured[terms[sorted(tree.measured_leaves)]] = True

    def _found(self, term: int, norm: float) -> None:
        """Note a hit, and look at what the step would be without all of them."""
        self._hits[term] = norm
        if len(self._hits) > self._limits.max_hits:
            self._stopped = True
            return
        if self._non_finite:
            return
        rest = self._without_hits(term)
        if rest is None:
            self._stopped = True
            return
        low, middle, high = rest
        threshold = self._threshold(self._table.without(list(self._hits)))
        self._explained = 1.0 - (middle / self._step_norm) ** 2
        self._rest_fires = low > threshold
        self._stopped = high <= threshold and self._explained >= EXPLAINED
        if self._stopped:
            self._left = high

    def _without_hits(self, term: int) -> tuple[float, float, float] | None:
        """The step's norm without all hits, of which `term` is the newest: at least, supposedly, at most; None where
        the budget has no pass for it."""
        part = int(self._table.micro_batch[term]), int(self._table.rank[term])
        hits = np.array(sorted(self._hits), dtype=np.int64)
        asked = hits if self._parts is None else np.setdiff1d(self._table.of(*part), hits)
        self._budget.reserved = 0
        if not self._budget.spend(self._probe.rest_cost(asked) if self._parts is None else self._probe.cost(asked)):
            return None
        self._budget.reserved = 1
        if self._parts is None:
            rest = self._probe.rest(asked)
            return rest - self._error, rest, rest + self._error
        self._parts[part] = self._probe.norm(asked)
        together, largest = float(self._parts.sum()), float(self._parts.max())
        return 2.0 * largest - together, together, together

    def _drop_needless_hits(self) -> None:
        """A term over its own threshold is no cause where the step would be below its threshold, and half of its norm
        explained, with it as well."""
        for term, norm in sorted(self._hits.items(), key=lambda hit: hit[1])[:-1]:
            with_it = self._left + norm
            explained = 1.0 - (with_it / self._step_norm) ** 2
            kept = [other for other in self._hits if other != term]
            if explained < EXPLAINED or with_it > self._threshold(self._table.without(kept)):
                return
            del self._hits[term]
            self._left, self._explained = with_it, explained

    def _outcome(self) -> Outcome:
        few = 0 < len(self._hits) <= self._limits.max_hits and (
            len(self._hits) == 1 or 2 * len(self._hits) <= self._table.position.size
        )
        # What is finite in sum is finite in every part, so a finished search for what is not has seen every culprit.
        finished = not self._budget.refused and (
            self._non_finite or (self._explained >= EXPLAINED and not self._rest_fires)
        )
        sufficient = math.isfinite(self._left) or finished
        if few and sufficient:
            return Outcome.LOCATED
        if self._budget.refused:
            return Outcome.INCONCLUSIVE
        return Outcome.CLEAN if not self._hits and bool(self._measured.all()) else Outcome.DIFFUSE
