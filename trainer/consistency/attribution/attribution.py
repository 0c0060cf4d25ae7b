"""Why engine and trainer differ: one what-if question after the other, each about what the answers before it left open.

It owns the order of the causes and the ceiling on what asking may cost. It must never know models or weights (the
`Rescorer` holds them), nor what follows from a cause. Pure numpy.

    structure -> units of the log -> re-tokenised turns -> semantics -> identity (weights, then version tag)
    -> filled-in entries -> other inputs -> routing -> precision -> stale KV -> tail -> unknown

Staleness is no cause here: every token is scored at the version that sampled it, so the gap is the engine's alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import Trajectory, VersionSpan
from trainer.config.consistency import GapLimits
from trainer.consistency.attribution.engine_inputs import BOUNDARY_FACTOR, ask_inputs, ask_through_text
from trainer.consistency.attribution.inquiry import KEPT_SHARE, AttributionFacts, Inquiry, num_affordable
from trainer.consistency.attribution.log_columns import ask_filler, ask_units
from trainer.consistency.attribution.precision import ask_precision
from trainer.consistency.attribution.semantics import ask_semantics
from trainer.consistency.attribution.versions import ask_identity
from trainer.consistency.checks.gap import tail_is_high
from trainer.consistency.checks.mismatch import TAIL_NATS
from trainer.consistency.scoring.protocols import Rescorer
from trainer.types.evidence import Attribution, GapCause

_WHOLE = (ask_units, ask_through_text, ask_semantics, ask_identity, ask_filler, ask_inputs)
"""Causes that are true of every token or of none, in order: the first one that is found ends the inquiry."""


def attribute(
    trajectories: Sequence[Trajectory],
    facts: AttributionFacts,
    rescorer: Rescorer,
    limits: GapLimits,
    *,
    max_tokens: int = 16384,
    behaviour: Sequence[NDArray[np.float32]] | None = None,
) -> Attribution | None:
    """Split mean |log pi_beh - log pi_rollout| over the scored sampled tokens into causes and a residual that nobody
    guesses at.

    Causes are tried in the order of the module's docstring; those that cannot apply are not asked for. A broken
    structure, wrong weights, and units, semantics, a version tag or other inputs that close 80 % of the gap end the
    inquiry: they must be mended before anything finer has a meaning. The others share the gap, each working on what is
    left under the options accepted before it. A stale replica also fits a version offset on all its trajectories; its
    digest or canary shows which, and is asked first.

    Returns:
        None where no token was scored, or where the gap is below `gap_floor` without a high tail: then there is nothing
        to explain.

    Args:
        trajectories: of one replica. Only the first ones with at most `max_tokens` tokens together are looked at,
            whole, but always the first.
        facts: what is known beside the log-probs.
        rescorer: answers what-if questions. A value is searched (temperature, top-k, other prompts) on a small part.
        limits: from where on a gap is worth a question.
        max_tokens: of one question, given tokens included.
        behaviour: [T] nats a trajectory, log pi_beh as it has been scored already, NaN where it was not; None scores it
            here.

    Raises:
        ValueError: no trajectories, or trajectories of several replicas.

    Source: CONSISTENCY.md, section 5.
    """
    if not trajectories or len({(t.tag.engine, t.tag.replica) for t in trajectories}) > 1:
        raise ValueError(
            f"got {len(trajectories)} trajectories of replicas {sorted({t.tag.replica for t in trajectories})}; "
            "expected some, of one replica"
        )
    chosen = trajectories[: num_affordable(trajectories, max_tokens)]
    scores = rescorer.score(chosen, facts.options) if behaviour is None else behaviour[: len(chosen)]
    inquiry = Inquiry(chosen, facts, rescorer, limits, scores)
    if inquiry.now.values.size == 0:
        return None
    broken = next((finding for finding in facts.structure if finding.breaks_tokens), None)
    if broken is not None:
        parts = ((GapCause.TOKENIZER, inquiry.gap),)
        return Attribution(gap=inquiry.gap, parts=parts, residual=0.0, readings=(broken.detail,))
    if inquiry.gap <= inquiry.floor and not _has_tail(inquiry):
        return None
    if not any(ask(inquiry) for ask in _WHOLE):
        _routing(inquiry)
        ask_precision(inquiry)
        _stale_kv(inquiry)
        _tail(inquiry)
    return inquiry.result()


def _routing(inquiry: Inquiry) -> None:
    if not inquiry.now.options.replay_routing and any(
        t.routing is not None and t.routing.covered.any() for t in inquiry.trajectories
    ):
        inquiry.keep(GapCause.ROUTING, inquiry.ask(replace(inquiry.now.options, replay_routing=True)), KEPT_SHARE)


def _stale_kv(inquiry: Inquiry) -> None:
    """Keys and values of older weights, read behind a version boundary inside one generation."""
    begins = [
        _first_gap(trajectory, gaps, inquiry.floor)
        for trajectory, gaps in zip(inquiry.trajectories, inquiry.spread(inquiry.now.gaps), strict=True)
    ]
    behind = inquiry.select(
        [np.arange(t.token_ids.size) >= begin for t, begin in zip(inquiry.trajectories, begins, strict=True)]
    )
    if not behind.any() or behind.all():
        return
    gaps, now = inquiry.now.gaps, inquiry.now
    if gaps[behind].mean() > BOUNDARY_FACTOR * gaps[~behind].mean():
        asked = [_kept_from(trajectory, begin) for trajectory, begin in zip(inquiry.trajectories, begins, strict=True)]
        kept = inquiry.ask(replace(now.options, keep_kv=True), asked)
        inquiry.keep(
            GapCause.STALE_KV, inquiry.answer(kept.options, np.where(behind, kept.values, now.values)), KEPT_SHARE
        )


def _first_gap(trajectory: Trajectory, gaps: NDArray[np.float64], floor: float) -> int:
    """Where the first span begins that continues the generation of another version with a gap; where none has one, the
    first that continues another version.

    T without such a span: spans that given tokens part are different generations.
    """
    inside = [
        later
        for earlier, later in pairwise(trajectory.version_spans)
        if earlier.end == later.start and earlier.policy != later.policy
    ]
    for span in inside:
        before, here = gaps[: span.start], gaps[span.start : span.end]
        if _mean(here) > max(floor, BOUNDARY_FACTOR * _mean(before)):
            return span.start
    return inside[0].start if inside else trajectory.token_ids.size


def _kept_from(trajectory: Trajectory, begin: int) -> Trajectory:
    """The same tokens, as if all of the generation before `begin` were of the version that sampled last before it: what
    recomputing left in the cache there."""
    spans = trajectory.version_spans
    last = next((index for index, span in enumerate(spans) if span.end == begin and index + 1 < len(spans)), None)
    if last is None:
        return trajectory
    first = last
    while first > 0 and spans[first - 1].end == spans[first].start:
        first -= 1
    joined = VersionSpan(spans[last].policy, spans[first].start, begin)
    return replace(trajectory, version_spans=(*spans[:first], joined, *spans[last + 1 :]))


def _mean(gaps: NDArray[np.float64]) -> float:
    """Mean of the known ones; 0 without any."""
    known = gaps[~np.isnan(gaps)]
    return float(known.mean()) if known.size else 0.0


def _has_tail(inquiry: Inquiry) -> bool:
    return tail_is_high(float((inquiry.now.gaps > TAIL_NATS).mean()), inquiry.limits, inquiry.facts.baseline)


def _tail(inquiry: Inquiry) -> None:
    """A few tokens carry the gap, and the mean over all of them is fine."""
    if inquiry.gap <= inquiry.limits.mean_abs_warn and _has_tail(inquiry):
        inquiry.explain(
            GapCause.LOW_PROBABILITY_TAIL, float(np.where(inquiry.now.gaps > TAIL_NATS, inquiry.now.gaps, 0.0).mean())
        )
