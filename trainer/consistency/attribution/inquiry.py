"""One attribution in the making: the tokens in question, the answer accepted so far, and what it leaves of the gap.
Pure numpy.

It knows how answers are compared and combined, never which causes there are.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import Trajectory, VersionSpan
from trainer.config.consistency import GapLimits
from trainer.consistency.checks.gap import GapBaseline, gap_floor
from trainer.consistency.checks.tokens import ThroughText, other_prefixes, placed_back
from trainer.consistency.scoring.protocols import Rescorer, ScoreOptions
from trainer.types.evidence import Attribution, CheckFinding, GapCause

_Scalar = TypeVar("_Scalar", bound=np.generic)

RAISED_SHARE = 0.95
"""An undeclared truncation is asked about where at least this share of the tokens is logged as likelier."""
ROUNDED_NATS = 1e-7
"""Exact agreement in float32."""
EXCLUDED_NATS = 30.0
"""Counted as the |d| of a token that the recomputed distribution excludes (log-prob -inf), so that means stay
finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionFacts:
    """What is known beside the log-probs."""

    structure: tuple[CheckFinding, ...] = ()
    """Findings about structure and tokenizer; one that failed explains everything."""
    canary_gap: float = 0.0
    """Mean |d| of the replica's answer to the canary, nats; NaN or infinity: no usable answer."""
    canary_tolerance: float = math.inf
    """Nats; without a canary no gap exceeds it."""
    baseline: GapBaseline | None = None
    """The replica's own gap at step 0."""
    options: ScoreOptions = field(default_factory=ScoreOptions)
    """How the trainer computes, routing replay included: every question starts from there."""
    through_text: ThroughText | None = None
    """What the tokenizer makes of ids that go through text and back; None: later turns are not asked about."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
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


class Inquiry:
    """One attribution in the making: the tokens in question, what has been accepted, and what it leaves of the gap."""

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        facts: AttributionFacts,
        rescorer: Rescorer,
        limits: GapLimits,
        behaviour: Sequence[NDArray[np.float32]],
    ) -> None:
        self.trajectories, self.facts, self.limits = trajectories, facts, limits
        self._rescorer = rescorer
        self._masks = [t.sampled & ~np.isnan(scores) for t, scores in zip(trajectories, behaviour, strict=True)]
        self._log = self.select([t.rollout_logprobs for t in trajectories])
        values = self.select(behaviour)
        self.now = Answer(options=facts.options, values=values, gaps=_gaps(values, self._log))
        self.gap = self.now.left if values.size else 0.0
        self._parts: list[tuple[GapCause, float]] = []

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

    def ask(self, options: ScoreOptions, trajectories: Sequence[Trajectory] | None = None) -> Answer:
        """Score again under other circumstances; `trajectories`: the same tokens with other labels."""
        return self.answer(options, self.select(self._rescorer.score(trajectories or self.trajectories, options)))

    def ask_behind(self, through_text: ThroughText) -> Answer | None:
        """Score later turns behind what text makes of the tokens before them, where that closes something; None where
        text gives the same ids."""
        others = other_prefixes(self.trajectories, through_text)
        if not others:
            return None
        options = replace(self.now.options, replay_routing=False)
        scores = self._rescorer.score([other.trajectory for other in others], options)
        rows = [row.astype(np.float32) for row in self.spread(self.now.values.astype(np.float64))]
        return self.begun(self.answer(self.now.options, self.select(placed_back(rows, others, scores))))

    def answer(self, options: ScoreOptions, values: NDArray[np.float32]) -> Answer:
        return Answer(
            options=options, values=values, gaps=np.where(np.isnan(values), self.now.gaps, _gaps(values, self._log))
        )

    def closes(self, answer: Answer) -> float:
        """Nats of what is left that this answer explains; negative where it makes matters worse."""
        return self.now.left - answer.left

    def best(self, candidates: Iterable[ScoreOptions], enough: float) -> Answer | None:
        """The answer that closes most; asking stops at the first one that closes the share `enough` of what is left."""
        return self._best(map(self.ask, candidates), enough)

    def best_by_span(self, candidates: Iterable[ScoreOptions], enough: float) -> Answer | None:
        """As `best`, where a candidate holds for some spans, or from a token of a span on, and the rest stays as it is:
        a fault begins, or touches a share."""
        return self._best((self.begun(self.ask(options)) for options in candidates), enough)

    def best_by_label(self, candidates: Iterable[ScoreOptions], enough: float) -> Answer | None:
        """As `best_by_span`, where each policy's tokens have a candidate of their own: a replica that stays at one
        version is off by more at each new one."""
        places, answers = self.select(_numbered(self.trajectories, lambda index, span: span.policy)), [self.now]
        for options in candidates:
            answers.append(self.begun(self.ask(options)))
            mixed = self._mixed(answers, places)
            if self.closes(mixed) >= enough * self.now.left:
                break
        return self._mixed(answers, places) if len(answers) > 1 else None

    def begun(self, answer: Answer) -> Answer:
        """In each span the present answer up to the token from which on `answer` leaves less: from its first, from
        none, or from one in between."""
        spans = self.select(_numbered(self.trajectories, lambda index, span: (index, span.start)))
        taken = np.zeros(spans.size, dtype=np.bool_)
        for start, end in pairwise([0, *(np.flatnonzero(np.diff(spans)) + 1), spans.size]):
            gained = np.cumsum((self.now.gaps[start:end] - answer.gaps[start:end])[::-1])[::-1]
            first = int(gained.argmax())
            taken[start + first : end] = gained[first] > 0.0
        values, gaps = (
            np.where(taken, theirs, mine)
            for theirs, mine in ((answer.values, self.now.values), (answer.gaps, self.now.gaps))
        )
        return Answer(options=answer.options, values=values, gaps=gaps)

    def _best(self, answers: Iterable[Answer], enough: float) -> Answer | None:
        best = None
        for answer in answers:
            best = answer if best is None or answer.left < best.left else best
            if self.closes(answer) >= enough * self.now.left:
                break
        return best

    def _mixed(self, answers: Sequence[Answer], place: NDArray[np.int64]) -> Answer:
        """For all tokens of one place the answer that leaves the least of their gap."""
        left = np.stack([np.bincount(place, weights=answer.gaps) for answer in answers])
        chosen, tokens = left.argmin(axis=0)[place], np.arange(place.size)
        values, gaps = np.stack([answer.values for answer in answers]), np.stack([answer.gaps for answer in answers])
        return Answer(options=self.now.options, values=values[chosen, tokens], gaps=gaps[chosen, tokens])

    def raised(self) -> bool:
        """Whether next to all tokens are logged as likelier than they are: truncation leaves the kept tokens more of
        the mass."""
        above = self._log.astype(np.float64) - self.now.values.astype(np.float64) > -ROUNDED_NATS
        return bool(above.mean() >= RAISED_SHARE)

    def keep(self, cause: GapCause, answer: Answer | None, share: float) -> bool:
        """Accept an answer that closes at least this share of the whole gap; later questions are asked under its
        options."""
        if answer is None or not self.explain(cause, self.closes(answer), share):
            return False
        self.now = answer
        return True

    def explain(self, cause: GapCause, nats: float, share: float = 0.0) -> bool:
        """Whether this is an explanation; then it is noted."""
        if nats <= 0.0 or nats < share * self.gap:
            return False
        self._parts.append((cause, nats))
        return True

    def result(self) -> Attribution:
        """What has been explained, and the rest."""
        return Attribution(
            gap=self.gap,
            parts=tuple(self._parts),
            residual=max(0.0, self.gap - math.fsum(nats for _, nats in self._parts)),
        )


def _numbered(
    trajectories: Sequence[Trajectory], key: Callable[[int, VersionSpan], Hashable]
) -> list[NDArray[np.int64]]:
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
