"""Scored trajectories of one engine: how large their gap is, when it is worth an attribution, and which of them it is
asked about. Numpy only; it must never know where trajectories come from or what becomes of a finding."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import Trajectory
from trainer.config.consistency import GapLimits
from trainer.consistency.attribution.attribution import attribute
from trainer.consistency.attribution.inquiry import AttributionFacts
from trainer.consistency.checks.gap import GapBaseline, GapSummary, check_gap, gap_floor, gap_summary
from trainer.consistency.checks.routing import RoutingAgreement
from trainer.consistency.scoring.protocols import Rescorer
from trainer.types.evidence import Attribution, CheckFinding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """One trajectory with its scores."""

    trajectory: Trajectory
    scores: NDArray[np.float32]
    """[T] nats, NaN where it could not be scored, -inf where the trainer excludes the token."""
    findings: tuple[CheckFinding, ...] = ()
    """About all but its gap."""
    routing: RoutingAgreement | None = None
    """None where there is none to compare."""
    moments: NDArray[np.float32] | None = None
    """[3, T] as of `MomentRescorer.score_with_moments`; None where nobody asked."""

    @property
    def mask(self) -> NDArray[np.bool_]:
        """[T] sampled and scored with a finite number."""
        return self.trajectory.sampled & np.isfinite(self.scores)

    def check_gap(self, limits: GapLimits) -> tuple[CheckFinding, ...]:
        """Its own gap against its ceilings."""
        return check_gap(gap_of([self]), limits, None)

    def fails(self, limits: GapLimits) -> bool:
        """Whether it fails by itself."""
        return any(finding.failed for finding in (*self.findings, *self.check_gap(limits)))


def gap_of(scored: Sequence[Scored]) -> GapSummary:
    """Over sampled tokens that were scored; one that the recomputed distribution excludes (-inf) counts."""
    masks = [each.trajectory.sampled & ~np.isnan(each.scores) for each in scored]
    return gap_summary([each.scores for each in scored], [each.trajectory.rollout_logprobs for each in scored], masks)


def is_out_of_bounds(
    gap: GapSummary, findings: Sequence[CheckFinding], limits: GapLimits, baseline: GapBaseline | None
) -> bool:
    """Whether a gap is worth an attribution: it lies above its floor, has a high tail, or is one of other tokens."""
    return gap.num_tokens > 0 and (
        gap.mean_abs > gap_floor(limits, baseline)
        or any(finding.code == "gap_tail" or finding.breaks_tokens for finding in findings)
    )


def attribute_worst(
    scored: Sequence[Scored], facts: AttributionFacts, rescorer: Rescorer, limits: GapLimits, max_tokens: int
) -> tuple[Attribution | None, int]:
    """The attribution of the trajectories that fail by themselves, or of all where only the sum does: a fault that
    touches a few must not drown in the rest. And how many it was asked about.

    Args:
        facts: what is known beside the log-probs and the findings of each trajectory.
        max_tokens: of one what-if question.
    """
    indices = [index for index, each in enumerate(scored) if each.fails(limits)] or list(range(len(scored)))
    asked = [scored[index] for index in indices]
    structure = (*facts.structure, *(finding for each in asked for finding in each.findings))
    found = attribute(
        [each.trajectory for each in asked],
        replace(facts, structure=structure, inputs=None if facts.inputs is None else facts.inputs.of(indices)),
        rescorer,
        limits,
        max_tokens=max_tokens,
        behaviour=[np.where(each.mask, each.scores, np.float32(np.nan)) for each in asked],
    )
    return found, len(asked)
