"""GradLoc for any FSDP2 loop: watches the gradient's norm, and names the token behind a spike. Layer 3 of diagnosis
(numerical updates).

    after the last backward, before any clip:  report = gradloc.observe(norm, StepData(...))
    where the step was then computed again, or not applied:  gradloc.amend(norm, weight_square) or gradloc.amend()

It changes neither gradients nor random state; what a loop does with a report (`config.action`) is the loop's own.
"""

import math
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from rollout.errors import UserError
from trainer.config.gradloc import GradLocConfig
from trainer.gradloc.probe.backward_record import BackwardRecord
from trainer.gradloc.probe.probe import GradientProbe, StepData, TokenLoss
from trainer.gradloc.probe.step_terms import NO_TERMS, RankTerms, StepTerms, Terms, rank_terms, step_terms
from trainer.gradloc.probe.term_pulls import Pulls, in_order_of_terms, likely_terms
from trainer.gradloc.search import EXPLAINED, SearchLimits, StepSearch
from trainer.gradloc.spent_passes import SpentPasses
from trainer.gradloc.thresholds import UsualNorm, set_threshold
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks
from trainer.types.gradloc import Outcome, SearchFacts
from trainer.types.step import MicroBatch

DEFAULT_BUDGET = 64
"""Passes of one search where the config leaves them open; twice the micro-batches where that is more."""
DEFAULT_SEARCHES = 10
"""Searches that may take all of their passes in any hundred steps with spikes, where the config leaves that open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermPlace:
    """Where a token term stands on its rank: as a suspect, on this one."""

    micro_batch: int
    row: int
    position: int
    """Place of the token in its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSigns:
    """What else a loop knows of its step; the same on all ranks."""

    loss: float = 0.0
    """Sum of all terms: a step triggers if this is not finite, too."""
    smallest_scale: float = 1.0
    """By which the clip is about to scale a block down, the smallest of all."""
    weight_square: float | None = None
    """Sum of the squared weights of all terms of all ranks; None: `observe` sums it up, and the suspects with it, in
    one small reduction."""
    num_suspects: int = 0
    """Suspects on all ranks; asked for only beside `weight_square`."""


_NO_SIGNS = StepSigns()
_SPIKES = ("threshold", "scale")
"""Triggers of a step that can be applied as it is: a search of it is worth only so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradLocHit(TermPlace):
    """One culprit."""

    rank: int
    """Whose micro-batch and row it is."""
    trajectory_id: str
    norm: float
    """L2 norm of the gradient of this term alone."""
    block_norms: tuple[tuple[str, float], ...]
    """(block, norm) of the same gradient, in the order of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradLocReport(SearchFacts):
    """One search; the same on all ranks."""

    hits: tuple[GradLocHit, ...] = ()
    """In the order found; only with `located` are they the cause."""


class GradLoc:
    """One rank's part; every rank has one and calls it alike."""

    def __init__(
        self,
        config: GradLocConfig,
        model: PolicyModel,
        loss: TokenLoss,
        ranks: Ranks,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Watch `model`, whose gradients are summed over ranks and come from `loss`.

        Args:
            dtype: that of the forward and backward pass.
        """
        self._config, self._model, self._loss, self._ranks = config, model, loss, ranks
        self._eps = float(torch.finfo(dtype).eps)
        self._usual = UsualNorm(config.threshold)
        self._for_suspects, self._for_spikes = SpentPasses(), SpentPasses()
        self._begun = False

    def observe(
        self,
        grad_norm: float,
        step: StepData,
        *,
        suspects: Sequence[TermPlace] = (),
        record: BackwardRecord | None = None,
        signs: StepSigns = _NO_SIGNS,
    ) -> GradLocReport | None:
        """Search the step if its norm asks for it and the passes allow it; None where nothing asks. Collective; after
        the last backward and before any clip.

        Args:
            grad_norm: global L2 norm of the step's gradient, the same on all ranks.
            suspects: of this rank.
            record: of every micro-batch of the step; saves most passes. It is forgotten afterwards.

        Raises:
            UserError: the budget is below the number of micro-batches of the first step; the record lacks a
                micro-batch; or the model has dropout and the step's random states are not there.
        """
        with nullcontext() if record is None else record.of_step(len(step.micro_batches)):
            return self._observed(grad_norm, step, suspects, record, signs)

    def _observed(
        self,
        grad_norm: float,
        step: StepData,
        suspects: Sequence[TermPlace],
        record: BackwardRecord | None,
        signs: StepSigns,
    ) -> GradLocReport | None:
        budget = self._budget(len(step.micro_batches))
        weight_square, num_suspects = (
            self._shared(step.micro_batches, len(suspects))
            if signs.weight_square is None
            else (signs.weight_square, signs.num_suspects)
        )
        tau = self._usual.tau()
        threshold = math.nan if math.isnan(tau) else set_threshold(tau, weight_square)
        self._usual.remember(grad_norm, weight_square)
        trigger = self._trigger(grad_norm, threshold, num_suspects > 0, signs)
        if not trigger:
            self._count("", 0)
            return None
        if trigger == "scale":
            whole = grad_norm * math.sqrt((1.0 - EXPLAINED) / weight_square)
            tau = whole if math.isnan(tau) else min(tau, whole)
        # tau is not asked for while the predicate is "is not finite".
        facts = SearchFacts(
            outcome=Outcome.NOT_SEARCHED, trigger=trigger, grad_norm=grad_norm, threshold=threshold, tau=tau
        )
        if trigger in _SPIKES and self._for_spikes.total >= (self._config.spike_passes or DEFAULT_SEARCHES * budget):
            report = GradLocReport(**facts.facts())
        else:
            report = self._search(facts, budget, step, suspects, record)
        self._count(trigger, report.passes)
        return report

    def amend(self, grad_norm: float | None = None, weight_square: float = 0.0) -> None:
        """What the last `observe` saw was not applied: the history is as it was before, and learns the norm of the step
        that was taken instead, if any.

        Args:
            grad_norm: of that step.
            weight_square: sum of the squared weights of its terms, over all ranks.
        """
        self._usual.amend(grad_norm, weight_square)

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint needs: the history of norms and of passes."""
        return {
            "history": self._usual.state(),
            "suspect_passes": self._for_suspects.state(),
            "spike_passes": self._for_spikes.state(),
        }

    def load_state(self, state: dict[str, list[float]]) -> None:
        self._usual.load_state(state["history"])
        self._for_suspects.load_state(state["suspect_passes"])
        self._for_spikes.load_state(state["spike_passes"])

    def _count(self, trigger: str, passes: int) -> None:
        """The step is over: what it cost, under what asked for it."""
        self._for_suspects.step(passes if trigger == "suspects" else 0)
        self._for_spikes.step(passes if trigger in _SPIKES else 0)

    def _budget(self, micro_batches: int) -> int:
        budget = self._config.budget_passes
        if budget is None:
            return max(DEFAULT_BUDGET, 2 * micro_batches)
        if budget < micro_batches and not self._begun:
            raise UserError(
                f"got trainer.gradloc.budget_passes = {budget}, and the first step has {micro_batches} micro-batches; a"
                f" search may take a pass for each: set it to {2 * micro_batches} or more, or raise "
                "trainer.micro_batch_tokens"
            )
        self._begun = True
        return budget

    def _shared(self, micro_batches: Sequence[MicroBatch], num_suspects: int) -> tuple[float, int]:
        """Sum of squared weights and suspects of all ranks, from one small reduction."""
        square = sum(
            float(np.dot(np.square(micro.token_weights.astype(np.float64)), micro.loss_mask.sum(axis=1)))
            for micro in micro_batches
        )
        weight_square, suspects = self._ranks.totals((square, float(num_suspects)))
        return weight_square, int(suspects)

    def _trigger(self, grad_norm: float, threshold: float, has_suspects: bool, signs: StepSigns) -> str:
        if not (math.isfinite(grad_norm) and math.isfinite(signs.loss)):
            return "non_finite"
        if grad_norm > threshold:  # never, where the threshold is NaN
            return "threshold"
        if signs.smallest_scale < self._config.scale_floor:
            return "scale"
        affordable = self._for_suspects.total < self._config.suspect_passes
        return "suspects" if has_suspects and affordable and grad_norm > self._config.suspect_factor * threshold else ""

    def _search(
        self,
        asked: SearchFacts,
        budget: int,
        step: StepData,
        suspects: Sequence[TermPlace],
        record: BackwardRecord | None,
    ) -> GradLocReport:
        start = perf_counter()
        only_suspects, non_finite = asked.trigger == "suspects", asked.trigger == "non_finite"
        if only_suspects:
            budget = min(budget, self._config.suspect_passes - self._for_suspects.total)
        limits = SearchLimits(
            tau=asked.tau, budget=budget, max_hits=self._config.max_hits, suspect_factor=self._config.suspect_factor
        )
        table, places, likely = self._gathered(step.micro_batches, suspects, record)
        # Norms of gradients do not know where a loss that is not finite comes from.
        only_loss = non_finite and math.isfinite(asked.grad_norm)
        known = None if record is None or only_loss else record.part_norms(len(step.micro_batches))
        probe = GradientProbe(
            self._model, self._loss, self._ranks, step, table, eps=self._eps, cut=self._config.cut_sequences
        )
        with probe:
            searched = StepSearch(probe, table, limits, math.nan if non_finite else asked.grad_norm)
            found = searched.run(places, known, likely=NO_TERMS if non_finite else likely, only_suspects=only_suspects)
        (forwarded,) = self._ranks.totals((float(probe.tokens_forwarded),))
        made = replace(
            asked,
            outcome=found.outcome,
            explained=found.explained,
            passes=found.passes,
            tokens_forwarded=int(forwarded),
            seconds=perf_counter() - start,
        )
        return GradLocReport(**made.facts(), hits=tuple(_hit(term, norm, table, probe) for term, norm in found.hits))

    def _gathered(
        self, micro_batches: Sequence[MicroBatch], suspects: Sequence[TermPlace], record: BackwardRecord | None
    ) -> tuple[StepTerms, Terms, Terms]:
        """The table of all ranks' terms, the suspects of all ranks in it, and the likely terms. Suspects without a term
        are no suspects of a gradient."""
        terms = rank_terms(micro_batches)
        pulls = None if record is None else record.term_pulls([rows.size for rows in terms.rows])
        mine: tuple[RankTerms, tuple[TermPlace, ...], tuple[Pulls, ...] | None] = (terms, tuple(suspects), pulls)
        all_ranks = [mine]
        if self._ranks.world > 1:
            all_ranks = [mine] * self._ranks.world
            cast(Any, dist).all_gather_object(all_ranks, mine)
        table = step_terms([terms for terms, _, _ in all_ranks])
        chosen = np.zeros(table.position.size, dtype=np.bool_)
        for rank, (_, places, _) in enumerate(all_ranks):
            for place in places:
                of_row = (table.micro_batch == place.micro_batch) & (table.rank == rank) & (table.row == place.row)
                chosen |= of_row & (table.position == place.position)
        of_ranks = [pulls for _, _, pulls in all_ranks if pulls is not None]
        likely = (
            likely_terms(in_order_of_terms(of_ranks), self._config.max_hits)
            if len(of_ranks) == len(all_ranks)
            else NO_TERMS
        )
        return table, np.flatnonzero(chosen), likely


def without_terms(micro_batches: Sequence[MicroBatch], hits: Sequence[GradLocHit], rank: int) -> tuple[MicroBatch, ...]:
    """The micro-batches of `rank` as if the hits had never been in the loss; weights, the fixed denominators, stay."""
    masks = [micro.loss_mask.copy() for micro in micro_batches]
    for hit in hits:
        if hit.rank == rank:
            masks[hit.micro_batch][hit.row, hit.position] = False
    return tuple(replace(micro, loss_mask=mask) for micro, mask in zip(micro_batches, masks, strict=True))


def without_trajectories(
    micro_batches: Sequence[MicroBatch], trajectory_ids: Collection[str]
) -> tuple[MicroBatch, ...]:
    """The same as if no term of these trajectories had ever been in the loss."""
    result: list[MicroBatch] = []
    for micro in micro_batches:
        kept = np.array([each not in trajectory_ids for each in micro.trajectory_ids], dtype=np.bool_)
        result.append(micro if kept.all() else replace(micro, loss_mask=micro.loss_mask & kept[:, None]))
    return tuple(result)


def _hit(term: int, norm: float, table: StepTerms, probe: GradientProbe) -> GradLocHit:
    micro_batch, rank, row = int(table.micro_batch[term]), int(table.rank[term]), int(table.row[term])
    return GradLocHit(
        micro_batch=micro_batch,
        rank=rank,
        row=row,
        position=int(table.position[term]),
        trajectory_id=table.trajectory_ids[micro_batch, rank][row],
        norm=norm,
        block_norms=probe.leaf_blocks.get(term, ()),
    )
