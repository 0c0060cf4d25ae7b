"""Why engine and trainer differ: one what-if question after the other, each about what the answers before it left open.

It owns the order of the causes, what counts as an explanation, and the ceiling on what asking may cost. It must never know models or weights (the `Rescorer`
holds them), nor what follows from a cause. Pure numpy.

    structure -> semantics -> identity (weights, then version tag) -> routing -> precision -> stale KV -> tail -> unknown

Staleness is no cause here: every token is scored at the version that sampled it, so the gap is the engine's alone.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout.number_formats import rounded_to_bf16
from rollout.trajectory import Trajectory, VersionSpan
from trainer.consistency.config import GapLimits
from trainer.consistency.evidence import Attribution, Cause, Check, Finding, Severity
from trainer.consistency.precision import TAIL_NATS, GapBaseline, gap_floor, tail_is_high
from trainer.consistency.protocols import Rescorer, ScoreOptions

_Scalar = TypeVar("_Scalar", bound=np.generic)

CLOSED_SHARE = 0.8
"""Semantics and version tag are a cause only if they close this share of the gap: true of every token or of none, so half an explanation is a coincidence."""
KEPT_SHARE = 0.1
"""Routing, precision and stale KV may share a gap; one that closes less than this share of it is noise."""
ROUNDED_SHARE = 0.99
"""Of the tokens must agree after rounding to bfloat16; a score a hair beside the middle of two grid points may round the other way."""
RAISED_SHARE = 0.95
"""Of the tokens must be logged as likelier before an undeclared truncation is asked about."""
ROUNDED_NATS = 1e-7
"""Exact agreement in float32."""
BOUNDARY_FACTOR = 2.0
"""Tokens behind a version boundary differ by this many times what those before it do: older keys and values are read only behind it."""
EXCLUDED_NATS = 30.0
"""Counted as the |d| of a token that the recomputed distribution excludes (log-prob -inf), so that means stay finite."""
VERSION_OFFSETS = (-1, 1, -2, 2)
UNDECLARED_TOP_P = (0.95, 0.9, 0.8, 0.99)
"""Nuclei that are in use; an engine that truncates without saying so does it at one of them."""
DEFAULT_MAX_TOKENS = 16384
_DTYPES: dict[str, Literal["float32", "bfloat16", "float16"]] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionFacts:
    """What is known beside the log-probs."""

    structure: tuple[Finding, ...] = ()
    """Findings about structure and tokenizer; one that failed explains everything."""
    digest_differs: bool = False
    """The replica's weights digest is not the published one."""
    canary_gap: float = 0.0
    """Mean |d| of the replica's answer to the canary, nats; NaN or infinity: no usable answer."""
    canary_tolerance: float = math.inf
    """Nats; without a canary no gap exceeds it."""
    baseline: GapBaseline | None = None
    """The replica's own gap at step 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Answer:
    """What would be if tokens were scored otherwise."""

    options: ScoreOptions
    values: NDArray[np.float32]
    """[n] log-probs, nats."""
    gaps: NDArray[np.float64]
    """[n] |d|, nats; a token that could not be scored keeps the gap that it had."""

    @property
    def left(self) -> float:
        """Mean |d|, nats."""
        return float(self.gaps.mean())


class _Inquiry:
    """One attribution in the making: the tokens in question, what has been accepted, and what it leaves of the gap."""

    def __init__(
        self, trajectories: Sequence[Trajectory], facts: AttributionFacts, rescorer: Rescorer, limits: GapLimits, behaviour: Sequence[NDArray[np.float32]]
    ) -> None:
        self.trajectories, self.facts, self.limits = trajectories, facts, limits
        self._rescorer = rescorer
        self._masks = [t.sampled & ~np.isnan(scores) for t, scores in zip(trajectories, behaviour, strict=True)]
        self._log = self.select([t.rollout_logprobs for t in trajectories])
        values = self.select(behaviour)
        self.now = _Answer(options=ScoreOptions(), values=values, gaps=_gaps(values, self._log))
        self.gap = self.now.left if values.size else 0.0
        self._parts: list[tuple[Cause, float]] = []

    def select(self, rows: Iterable[NDArray[_Scalar]]) -> NDArray[_Scalar]:
        """[n] the tokens in question out of one [T] a trajectory."""
        return np.concatenate([row[mask] for row, mask in zip(rows, self._masks, strict=True)])

    @property
    def floor(self) -> float:
        """Mean |d| in nats from where on a gap is worth a question."""
        return gap_floor(self.limits, self.facts.baseline)

    def spread(self, values: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """[T] a trajectory: the inverse of `select`, NaN outside."""
        rows = [np.full(mask.size, np.nan) for mask in self._masks]
        parts = np.split(values, np.cumsum([np.count_nonzero(mask) for mask in self._masks])[:-1])
        for row, mask, part in zip(rows, self._masks, parts, strict=True):
            row[mask] = part
        return rows

    def ask(self, options: ScoreOptions, trajectories: Sequence[Trajectory] | None = None) -> _Answer:
        """Score again under other circumstances; `trajectories`: the same tokens with other labels."""
        return self.answer(options, self.select(self._rescorer.score(trajectories or self.trajectories, options)))

    def answer(self, options: ScoreOptions, values: NDArray[np.float32]) -> _Answer:
        return _Answer(options=options, values=values, gaps=np.where(np.isnan(values), self.now.gaps, _gaps(values, self._log)))

    def closes(self, answer: _Answer) -> float:
        """Nats of what is left that this answer explains; negative where it makes matters worse."""
        return self.now.left - answer.left

    def best(self, candidates: Iterable[ScoreOptions], enough: float) -> _Answer | None:
        """The answer that closes most; asking stops at the first one that closes the share `enough` of what is left."""
        return self._best(map(self.ask, candidates), enough)

    def best_by_span(self, candidates: Iterable[ScoreOptions], enough: float) -> _Answer | None:
        """As `best`, where a candidate holds for some spans, or from a token of a span on, and the rest stays as it is: a fault begins, or touches a share."""
        return self._best((self.begun(self.ask(options)) for options in candidates), enough)

    def best_by_label(self, candidates: Iterable[ScoreOptions], enough: float) -> _Answer | None:
        """As `best_by_span`, where each policy's tokens have a candidate of their own: a replica that stays at one version is off by more at each new one."""
        places, answers = self.select(_numbered(self.trajectories, lambda index, span: span.policy)), [self.now]
        for options in candidates:
            answers.append(self.begun(self.ask(options)))
            mixed = self._mixed(answers, places)
            if self.closes(mixed) >= enough * self.now.left:
                break
        return self._mixed(answers, places) if len(answers) > 1 else None

    def begun(self, answer: _Answer) -> _Answer:
        """In each span the present answer up to the token from which on `answer` leaves less: from its first, from none, or from one in between."""
        spans = self.select(_numbered(self.trajectories, lambda index, span: (index, span.start)))
        taken = np.zeros(spans.size, dtype=np.bool_)
        for start, end in pairwise([0, *(np.flatnonzero(np.diff(spans)) + 1), spans.size]):
            gained = np.cumsum((self.now.gaps[start:end] - answer.gaps[start:end])[::-1])[::-1]
            first = int(gained.argmax())
            taken[start + first : end] = gained[first] > 0.0
        values, gaps = (np.where(taken, theirs, mine) for theirs, mine in ((answer.values, self.now.values), (answer.gaps, self.now.gaps)))
        return _Answer(options=answer.options, values=values, gaps=gaps)

    def _best(self, answers: Iterable[_Answer], enough: float) -> _Answer | None:
        best = None
        for answer in answers:
            best = answer if best is None or answer.left < best.left else best
            if self.closes(answer) >= enough * self.now.left:
                break
        return best

    def _mixed(self, answers: Sequence[_Answer], place: NDArray[np.int64]) -> _Answer:
        """For all tokens of one place the answer that leaves the least of their gap."""
        left = np.stack([np.bincount(place, weights=answer.gaps) for answer in answers])
        chosen, tokens = left.argmin(axis=0)[place], np.arange(place.size)
        values, gaps = np.stack([answer.values for answer in answers]), np.stack([answer.gaps for answer in answers])
        return _Answer(options=self.now.options, values=values[chosen, tokens], gaps=gaps[chosen, tokens])

    def raised(self) -> bool:
        """Whether next to all tokens are logged as likelier than they are: truncation leaves the kept tokens more of the mass."""
        above = self._log.astype(np.float64) - self.now.values.astype(np.float64) > -ROUNDED_NATS
        return bool(above.mean() >= RAISED_SHARE)

    def keep(self, cause: Cause, answer: _Answer | None, share: float) -> bool:
        """Accept an answer that closes at least this share of the whole gap; later questions are asked under its options."""
        if answer is None or not self.explain(cause, self.closes(answer), share):
            return False
        self.now = answer
        return True

    def explain(self, cause: Cause, nats: float, share: float = 0.0) -> bool:
        """Whether this is an explanation; then it is noted."""
        if nats <= 0.0 or nats < share * self.gap:
            return False
        self._parts.append((cause, nats))
        return True

    def result(self) -> Attribution:
        """What has been explained, and the rest."""
        return Attribution(gap=self.gap, parts=tuple(self._parts), residual=max(0.0, self.gap - math.fsum(nats for _, nats in self._parts)))


def attribute(
    trajectories: Sequence[Trajectory],
    facts: AttributionFacts,
    rescorer: Rescorer,
    limits: GapLimits,
    *,
    max_tokens: int = DEFAULT_MAX_TOKENS,
    behaviour: Sequence[NDArray[np.float32]] | None = None,
) -> Attribution | None:
    """Split mean |log pi_beh - log pi_rollout| over the scored sampled tokens into causes and a residual that nobody guesses at.

    Causes are tried in the order of the module's docstring; those that cannot apply are not asked for. A broken structure, wrong weights, and semantics or a
    version tag that closes 80 % of the gap end the inquiry: they must be mended before anything finer has a meaning. The others share the gap, each working on
    what is left under the options accepted before it. A stale replica also fits a version offset on all its trajectories; its digest or canary tells, and is
    asked first.

    Returns:
        None where no token was scored, or where the gap is below `gap_floor` without a high tail: then there is nothing to explain.

    Args:
        trajectories: of one replica. Only the first ones with at most `max_tokens` tokens together are looked at, whole, but always the first.
        facts: what is known beside the log-probs.
        rescorer: answers what-if questions; it is asked at most 15 times, and once more without `behaviour`.
        limits: from where on a gap is worth a question.
        max_tokens: of one question, given tokens included.
        behaviour: [T] nats a trajectory, log pi_beh as it has been scored already, NaN where it was not; None scores it here.

    Raises:
        ValueError: no trajectories, or trajectories of several replicas.

    Source: CONSISTENCY.md, section 5.
    """
    if not trajectories or len({(t.tag.engine, t.tag.replica) for t in trajectories}) > 1:
        raise ValueError(f"got {len(trajectories)} trajectories of replicas {sorted({t.tag.replica for t in trajectories})}; expected some, of one replica")
    chosen = _affordable(trajectories, max_tokens)
    scores = rescorer.score(chosen, ScoreOptions()) if behaviour is None else behaviour[: len(chosen)]
    inquiry = _Inquiry(chosen, facts, rescorer, limits, scores)
    if inquiry.now.values.size == 0:
        return None
    broken = any(f.severity is Severity.FAIL and f.check in (Check.STRUCTURE, Check.TOKENIZER) for f in facts.structure)
    if broken:
        return Attribution(gap=inquiry.gap, parts=((Cause.TOKENIZER, inquiry.gap),), residual=0.0)
    if inquiry.gap <= inquiry.floor and not _has_tail(inquiry):
        return None
    if not (_semantics(inquiry) or _identity(inquiry)):
        _routing(inquiry)
        _precision(inquiry)
        _stale_kv(inquiry)
        _tail(inquiry)
    return inquiry.result()


def _affordable(trajectories: Sequence[Trajectory], max_tokens: int) -> Sequence[Trajectory]:
    total = np.cumsum([t.token_ids.size for t in trajectories])
    return trajectories[: max(1, int(np.count_nonzero(total <= max_tokens)))]


def _numbered(trajectories: Sequence[Trajectory], key: Callable[[int, VersionSpan], Hashable]) -> list[NDArray[np.int64]]:
    """[T] a trajectory: tokens of spans with the same key have the same number; tokens outside spans have any."""
    numbers: dict[Hashable, int] = {}
    rows: list[NDArray[np.int64]] = []
    for index, trajectory in enumerate(trajectories):
        row = np.zeros(trajectory.token_ids.size, dtype=np.int64)
        for span in trajectory.version_spans:
            row[span.start : span.end] = numbers.setdefault(key(index, span), len(numbers))
        rows.append(row)
    return rows


def _gaps(values: NDArray[np.float32], log: NDArray[np.float32]) -> NDArray[np.float64]:
    """[n] |d| in nats, in float64."""
    gaps = np.abs(values.astype(np.float64) - log.astype(np.float64))
    return np.where(np.isinf(gaps), EXCLUDED_NATS, gaps)


def _semantics(inquiry: _Inquiry) -> bool:
    """The log belongs to the distribution before truncation, or to the raw one; or the engine truncates and does not say so."""
    tags = [t.tag for t in inquiry.trajectories]
    truncated = any(tag.top_p < 1.0 or tag.top_k > 0 for tag in tags)
    candidates: list[ScoreOptions] = []
    if truncated:
        candidates.append(ScoreOptions(truncate=False))
    if any(tag.temperature != 1.0 for tag in tags):
        candidates.append(ScoreOptions(temperature=1.0, truncate=not truncated))
    if inquiry.keep(Cause.LOGPROB_SEMANTICS, inquiry.best_by_span(candidates, 1.0), CLOSED_SHARE):
        return True
    undeclared = () if truncated or not inquiry.raised() else tuple(ScoreOptions(top_p=top_p) for top_p in UNDECLARED_TOP_P)
    return inquiry.keep(Cause.LOGPROB_SEMANTICS, inquiry.best_by_span(undeclared, CLOSED_SHARE), CLOSED_SHARE)


def _identity(inquiry: _Inquiry) -> bool:
    """Other weights than the log says: the replica's fault, or the log's."""
    facts = inquiry.facts
    if facts.digest_differs or not facts.canary_gap <= facts.canary_tolerance:
        return inquiry.explain(Cause.WEIGHT_SYNC, inquiry.gap - (0.0 if facts.baseline is None else facts.baseline.mean_abs))
    newest = max(span.policy.version for t in inquiry.trajectories for span in t.version_spans)
    candidates = [ScoreOptions(version_offset=offset) for offset in VERSION_OFFSETS if newest + offset >= 0]
    return inquiry.keep(Cause.VERSION_TAG, inquiry.best_by_label(candidates, CLOSED_SHARE), CLOSED_SHARE)


def _routing(inquiry: _Inquiry) -> None:
    if any(t.routing is not None and t.routing.covered.any() for t in inquiry.trajectories):
        inquiry.keep(Cause.ROUTING, inquiry.ask(replace(inquiry.now.options, replay_routing=True)), KEPT_SHARE)


def _precision(inquiry: _Inquiry) -> None:
    """Other number formats: of the log-probs on their way, which costs no question, then of the arithmetic, then of the weights."""
    if inquiry.keep(Cause.PRECISION, _rounded(inquiry, inquiry.now), KEPT_SHARE):
        return
    options, tag = inquiry.now.options, inquiry.trajectories[0].tag
    declared = _DTYPES.get(tag.weights_dtype)
    compute = options if declared is None else replace(options, dtype=declared)
    candidates = dict.fromkeys((compute, replace(options, dtype="float32"), replace(compute, weights_dtype="float8_e4m3")))
    candidates.pop(options, None)
    best = inquiry.best(candidates, CLOSED_SHARE)
    if best is not None:
        inquiry.keep(Cause.PRECISION, _rounded(inquiry, best) or best, KEPT_SHARE)


def _rounded(inquiry: _Inquiry, answer: _Answer) -> _Answer | None:
    """The answer after transport in bfloat16, if where that helps the log then agrees with it to the last bit."""
    values = np.where(np.isnan(answer.values), answer.values, rounded_to_bf16(answer.values))
    begun = inquiry.begun(inquiry.answer(answer.options, values))
    helps = begun.gaps < answer.gaps
    agree = np.isfinite(values) & (begun.gaps <= ROUNDED_NATS)
    return begun if helps.any() and agree[helps].mean() >= ROUNDED_SHARE else None


def _stale_kv(inquiry: _Inquiry) -> None:
    """Keys and values of older weights, read behind a version boundary inside one generation."""
    begins = [_first_gap(trajectory, gaps, inquiry.floor) for trajectory, gaps in zip(inquiry.trajectories, inquiry.spread(inquiry.now.gaps), strict=True)]
    behind = inquiry.select([np.arange(t.token_ids.size) >= begin for t, begin in zip(inquiry.trajectories, begins, strict=True)])
    if not behind.any() or behind.all():
        return
    gaps, now = inquiry.now.gaps, inquiry.now
    if gaps[behind].mean() > BOUNDARY_FACTOR * gaps[~behind].mean():
        asked = [_kept_from(trajectory, begin) for trajectory, begin in zip(inquiry.trajectories, begins, strict=True)]
        kept = inquiry.ask(replace(now.options, keep_kv=True), asked)
        inquiry.keep(Cause.STALE_KV, inquiry.answer(kept.options, np.where(behind, kept.values, now.values)), KEPT_SHARE)


def _first_gap(trajectory: Trajectory, gaps: NDArray[np.float64], floor: float) -> int:
    """Where the first span begins that continues the generation of another version with a gap; where none has one, the first that continues another version.

    T without such a span: spans that given tokens part are different generations.
    """
    inside = [later for earlier, later in pairwise(trajectory.version_spans) if earlier.end == later.start and earlier.policy != later.policy]
    for span in inside:
        before, here = gaps[: span.start], gaps[span.start : span.end]
        if _mean(here) > max(floor, BOUNDARY_FACTOR * _mean(before)):
            return span.start
    return inside[0].start if inside else trajectory.token_ids.size


def _kept_from(trajectory: Trajectory, begin: int) -> Trajectory:
    """The same tokens, as if all of the generation before `begin` were of the version that sampled last before it: what recomputing left in the cache there."""
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
    """Of those that are known; 0 without any."""
    known = gaps[~np.isnan(gaps)]
    return float(known.mean()) if known.size else 0.0


def _has_tail(inquiry: _Inquiry) -> bool:
    return tail_is_high(float((inquiry.now.gaps > TAIL_NATS).mean()), inquiry.limits, inquiry.facts.baseline)


def _tail(inquiry: _Inquiry) -> None:
    """A few tokens carry the gap, and the mean over all of them is fine."""
    if inquiry.gap <= inquiry.limits.mean_abs_warn and _has_tail(inquiry):
        inquiry.explain(Cause.LOW_PROBABILITY_TAIL, float(np.where(inquiry.now.gaps > TAIL_NATS, inquiry.now.gaps, 0.0).mean()))
