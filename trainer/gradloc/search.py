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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.gradloc.probe.step_terms import NO_TERMS, StepTerms, Terms
from trainer.gradloc.thresholds import set_threshold
from trainer.gradloc.tree import PassBudget, Segment, TreeSearch, size_of_norm
from trainer.types.gradloc import Outcome

KAPPA = 16.0
"""The norm of a difference is off by at most this x eps x the norm of what it is taken from."""
CARRIES = 0.5
"""Suspects with less than this share of the step's norm do not carry its spike, whatever their own thresholds say."""
EXPLAINED = 0.5
"""Share of the squared norm that hits must take away to count as the cause."""


class StepProbe(Protocol):
    """Measures gradients of chosen terms of a step; the step's own gradient is set aside."""

    @property
    def eps(self) -> float:
        """Rounding of the numbers that compute."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """What a search may do and from where on it is suspicious."""

    tau: float
    """Norm of one token's gradient, before its weight."""
    budget: int
    """Passes."""
    max_hits: int
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

    def __init__(
        self,
        probe: StepProbe,
        terms: Terms,
        offsets: Sequence[int] | NDArray[np.int64],
        fires: Callable[[float, Terms], bool],
    ) -> None:
        self._probe, self._terms, self._offsets, self._fires = probe, terms, offsets, fires
        self.num_leaves = len(offsets) - 1

    def of(self, segment: Segment) -> Terms:
        return self._terms[self._offsets[segment.start] : self._offsets[segment.end]]

    def cost(self, segment: Segment) -> int:
        return self._probe.cost(self.of(segment))

    def norm(self, segment: Segment) -> float:
        return self._probe.norm(self.of(segment))

    def fires(self, norm: float, segment: Segment) -> bool:
        return self._fires(norm, self.of(segment))


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
            self._budget.refuse()  # all others were not looked at
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

    def _tree(self, terms: Terms, offsets: Sequence[int] | NDArray[np.int64], factor: float = 1.0) -> TreeSearch:
        leaves = _Leaves(self._probe, terms, offsets, partial(self._fires, factor=factor))
        return TreeSearch(leaves, self._budget, non_finite=self._non_finite)

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
            self._search_tokens(suspects, factor)

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
        """Each micro-batch over its threshold; with `known` each that has a part over the part's."""
        table = self._table
        if known is None:
            norms = self._norms_of_micro_batches()
            firing = [m for m, norm in enumerate(norms) if self._fires(norm, table.of(m))]
        else:
            norms = [float(np.max(of_ranks)) for of_ranks in known]
            firing = [m for m in range(table.num_micro_batches) if self._ranks_over(m, known)]
        if not self._non_finite:
            self._budget.reserve(1)  # a hit is worth little unless it is confirmed
        for micro_batch in sorted(firing, key=lambda m: -size_of_norm(norms[m])):
            self._search_ranks(micro_batch, known)
            if self._stopped:
                return

    def _norms_of_micro_batches(self) -> list[float]:
        """Norm of each micro-batch; none where the budget has no passes for all."""
        if self._table.num_micro_batches == 1 and not self._non_finite:
            return [self._step_norm]
        norms: list[float] = []
        for micro_batch in range(self._table.num_micro_batches):
            terms = self._table.of(micro_batch)
            if not self._budget.spend(self._probe.cost(terms)):
                return []
            norms.append(self._probe.norm(terms))
        return norms

    def _ranks_over(self, micro_batch: int, known: NDArray[np.float64]) -> list[int]:
        """Ranks whose part of a micro-batch is over its threshold, the largest norm first."""
        norms = [float(norm) for norm in known[micro_batch]]
        firing = [rank for rank, norm in enumerate(norms) if self._fires(norm, self._table.of(micro_batch, rank))]
        return sorted(firing, key=lambda rank: -size_of_norm(norms[rank]))

    def _search_ranks(self, micro_batch: int, known: NDArray[np.float64] | None) -> None:
        parts = [self._table.of(micro_batch, rank) for rank in range(self._table.world)]
        if known is not None:
            ranks: Iterable[int] = self._ranks_over(micro_batch, known)
        elif self._table.world == 1:
            ranks = [0]
        else:
            offsets = np.concatenate(([0], np.cumsum([part.size for part in parts])))
            ranks = (hit.leaf for hit in self._tree(self._table.of(micro_batch), offsets).hits())
        for rank in ranks:
            self._search_tokens(parts[rank])
            if self._stopped:
                return

    def _search_tokens(self, terms: Terms, factor: float = 1.0) -> None:
        tree = self._tree(terms, np.arange(terms.size + 1), factor)
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
        self._budget.reserve(0)
        if not self._budget.spend(self._probe.rest_cost(asked) if self._parts is None else self._probe.cost(asked)):
            return None
        self._budget.reserve(1)
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
