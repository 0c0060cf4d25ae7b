"""Why engine and trainer differ: one what-if question after the other, each about what the answers before it left open.

It owns the order of the causes, what counts as an explanation, and the ceiling on what asking may cost. It must never
know models or weights (the `Rescorer` holds them), nor what follows from a cause. Pure numpy.

    structure -> re-tokenised turns -> semantics -> identity (weights, then version tag) -> routing -> precision
    -> stale KV -> tail -> unknown

Staleness is no cause here: every token is scored at the version that sampled it, so the gap is the engine's alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollout.published.number_formats import rounded_to_bf16
from rollout.types.trajectory import Trajectory, VersionSpan
from trainer.config.consistency import GapLimits
from trainer.consistency.attribution.inquiry import ROUNDED_NATS, Answer, AttributionFacts, Inquiry
from trainer.consistency.checks.gap import tail_is_high
from trainer.consistency.checks.mismatch import TAIL_NATS
from trainer.consistency.checks.tokens import is_later
from trainer.consistency.scoring.protocols import Rescorer, ScoreOptions
from trainer.types.evidence import Attribution, GapCause

CLOSED_SHARE = 0.8
"""Semantics and version tag are a cause only if they close this share of the gap: true of every token or of none, so
half an explanation is a coincidence."""
KEPT_SHARE = 0.1
"""Routing, precision and stale KV may share a gap; one that closes less than this share of it is noise."""
ROUNDED_SHARE = 0.99
"""This share of the tokens must agree after rounding to bfloat16; a score a hair beside the middle of
two grid points may round the other way."""
BOUNDARY_FACTOR = 2.0
"""Tokens behind a version boundary differ by this many times what those before it do: older keys and values are read
only behind it."""
VERSION_OFFSETS = (-1, 1, -2, 2)
UNDECLARED_TOP_P = (0.95, 0.9, 0.8, 0.99)
"""Nuclei that are in use; an engine that truncates without saying so does it at one of them."""
_DTYPES: dict[str, Literal["float32", "bfloat16", "float16"]] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}


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
    structure, wrong weights, and semantics or a version tag that closes 80 % of the gap end the inquiry: they must be
    mended before anything finer has a meaning. The others share the gap, each working on what is left under the options
    accepted before it. A stale replica also fits a version offset on all its trajectories; its digest or canary shows
    which, and is asked first.

    Returns:
        None where no token was scored, or where the gap is below `gap_floor` without a high tail: then there is nothing
        to explain.

    Args:
        trajectories: of one replica. Only the first ones with at most `max_tokens` tokens together are looked at,
            whole, but always the first.
        facts: what is known beside the log-probs.
        rescorer: answers what-if questions; it is asked at most 16 times, and once more without `behaviour`.
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
    chosen = _affordable(trajectories, max_tokens)
    scores = rescorer.score(chosen, facts.options) if behaviour is None else behaviour[: len(chosen)]
    inquiry = Inquiry(chosen, facts, rescorer, limits, scores)
    if inquiry.now.values.size == 0:
        return None
    if any(finding.breaks_tokens for finding in facts.structure):
        return Attribution(gap=inquiry.gap, parts=((GapCause.TOKENIZER, inquiry.gap),), residual=0.0)
    if inquiry.gap <= inquiry.floor and not _has_tail(inquiry):
        return None
    if not (_retokenized(inquiry) or _semantics(inquiry) or _identity(inquiry)):
        _routing(inquiry)
        _precision(inquiry)
        _stale_kv(inquiry)
        _tail(inquiry)
    return inquiry.result()


def _affordable(trajectories: Sequence[Trajectory], max_tokens: int) -> Sequence[Trajectory]:
    total = np.cumsum([t.token_ids.size for t in trajectories])
    return trajectories[: max(1, int(np.count_nonzero(total <= max_tokens)))]


def _retokenized(inquiry: Inquiry) -> bool:
    """The turns before a later one went through text: the engine continued other ids than the sample holds."""
    through_text, gaps = inquiry.facts.through_text, inquiry.now.gaps
    later = inquiry.select([is_later(t) for t in inquiry.trajectories])
    if (
        through_text is None
        or not later.any()
        or gaps[later].mean() <= BOUNDARY_FACTOR * (gaps[~later].mean() if not later.all() else 0.0)
    ):
        return False
    return inquiry.keep(GapCause.TOKENIZER, inquiry.ask_behind(through_text), CLOSED_SHARE)


def _semantics(inquiry: Inquiry) -> bool:
    """The log belongs to the distribution before truncation, or to the raw one; or the engine truncates and does not
    say so."""
    tags, base = [t.tag for t in inquiry.trajectories], inquiry.now.options
    truncated = any(tag.top_p < 1.0 or tag.top_k > 0 for tag in tags)
    candidates: list[ScoreOptions] = []
    if truncated:
        candidates.append(replace(base, truncate=False))
    if any(tag.temperature != 1.0 for tag in tags):
        candidates.append(replace(base, temperature=1.0, truncate=not truncated))
    if inquiry.keep(GapCause.LOGPROB_SEMANTICS, inquiry.best_by_span(candidates, 1.0), CLOSED_SHARE):
        return True
    undeclared = (
        () if truncated or not inquiry.raised() else tuple(replace(base, top_p=top_p) for top_p in UNDECLARED_TOP_P)
    )
    return inquiry.keep(GapCause.LOGPROB_SEMANTICS, inquiry.best_by_span(undeclared, CLOSED_SHARE), CLOSED_SHARE)


def _identity(inquiry: Inquiry) -> bool:
    """Other weights than the log says: the replica's fault, or the log's."""
    facts = inquiry.facts
    if not facts.canary_gap <= facts.canary_tolerance:
        return inquiry.explain(
            GapCause.WEIGHT_SYNC, inquiry.gap - (0.0 if facts.baseline is None else facts.baseline.mean_abs)
        )
    newest = max(span.policy.version for t in inquiry.trajectories for span in t.version_spans)
    candidates = [
        replace(inquiry.now.options, version_offset=offset) for offset in VERSION_OFFSETS if newest + offset >= 0
    ]
    return inquiry.keep(GapCause.VERSION_TAG, inquiry.best_by_label(candidates, CLOSED_SHARE), CLOSED_SHARE)


def _routing(inquiry: Inquiry) -> None:
    if not inquiry.now.options.replay_routing and any(
        t.routing is not None and t.routing.covered.any() for t in inquiry.trajectories
    ):
        inquiry.keep(GapCause.ROUTING, inquiry.ask(replace(inquiry.now.options, replay_routing=True)), KEPT_SHARE)


def _precision(inquiry: Inquiry) -> None:
    """Other number formats: of the log-probs on their way, which costs no question, then of the arithmetic, then of the
    weights."""
    if inquiry.keep(GapCause.PRECISION, _rounded(inquiry, inquiry.now), KEPT_SHARE):
        return
    options, tag = inquiry.now.options, inquiry.trajectories[0].tag
    declared = _DTYPES.get(tag.weights_dtype)
    compute = options if declared is None else replace(options, dtype=declared)
    candidates = dict.fromkeys(
        (compute, replace(options, dtype="float32"), replace(compute, weights_dtype="float8_e4m3"))
    )
    candidates.pop(options, None)
    best = inquiry.best(candidates, CLOSED_SHARE)
    if best is not None:
        inquiry.keep(GapCause.PRECISION, _rounded(inquiry, best) or best, KEPT_SHARE)


def _rounded(inquiry: Inquiry, answer: Answer) -> Answer | None:
    """The answer after transport in bfloat16, if where that helps the log then agrees with it to the last bit."""
    values = np.where(np.isnan(answer.values), answer.values, rounded_to_bf16(answer.values))
    begun = inquiry.begun(inquiry.answer(answer.options, values))
    helps = begun.gaps < answer.gaps
    agree = np.isfinite(values) & (begun.gaps <= ROUNDED_NATS)
    return begun if helps.any() and agree[helps].mean() >= ROUNDED_SHARE else None


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
