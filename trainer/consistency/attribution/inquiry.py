"""One attribution in the making: the tokens in question, the answer accepted so far, and what it leaves of the gap.
Pure numpy.

It knows how answers are compared and combined, never which causes there are.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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

CLOSED_SHARE = 0.8
"""Another distribution, version or input, and a column that stands elsewhere: true of every token or of none, so less
than this share of the gap is a coincidence."""
KEPT_SHARE = 0.1
"""Routing, precision and stale KV may share a gap; one that closes less than this share of it is noise."""
ROUNDED_NATS = 1e-7
"""Exact agreement in float32."""
EXCLUDED_NATS = 30.0
"""Counted as the |d| of a token that the recomputed distribution excludes (log-prob -inf), so that means stay
finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualSampling:
    """How a sampler that nobody configured would sample."""

    reading: str
    """Where that stands."""
    temperature: float
    top_p: float
    """1 is off."""
    top_k: int
    """0 is off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFacts:
    """What an engine of another framework may have read in place of the ids of a dump."""

    pad_ids: tuple[int, ...]
    """Ids that prompts are padded with, the likeliest first."""
    bos_id: int | None
    max_context: int | None
    widths: Mapping[str, tuple[int, ...]]
    """How prompts may have been padded, in words -> the width a trajectory, in the order of the trajectories."""

    def of(self, indices: Sequence[int]) -> "InputFacts":
        """The same about some of the trajectories."""
        return replace(self, widths={name: tuple(each[i] for i in indices) for name, each in self.widths.items()})


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
    usual: tuple[UsualSampling, ...] = ()
    """Sampling that the model's files recommend."""
    inputs: InputFacts | None = None
    """None: the engine is known to have read these very ids, so nothing else is asked about."""

    @property
    def canary_holds(self) -> bool:
        """Whether the replica answered the canary as its weights would; a missing answer is none."""
        return self.canary_gap <= self.canary_tolerance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What would be if tokens were scored otherwise."""

    options: ScoreOptions
    values: NDArray[np.float32]
    """[n] log-probs, nats."""
    gaps: NDArray[np.float64]
    """[n] |d|, nats; a token that could not be scored keeps the gap that it had."""
    reading: str = ""
    """What it stands for, in words; empty where its options say it all."""

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
        self._readings: list[str] = []

    @property
    def log(self) -> NDArray[np.float32]:
        """[n] nats as logged."""
        return self._log

    @property
    def counts(self) -> NDArray[np.int64]:
        """[trajectories] tokens in question."""
        return np.array([np.count_nonzero(mask) for mask in self._masks], dtype=np.int64)

    def part(self, max_tokens: int) -> "Inquiry":
        """The same inquiry about the first trajectories with at most `max_tokens` tokens together, always the first: a
        search asks there and confirms on the whole."""
        chosen = self.trajectories[: num_affordable(self.trajectories, max_tokens)]
        rows = [row.astype(np.float32) for row in self.spread(self.now.values.astype(np.float64))[: len(chosen)]]
        facts = replace(self.facts, options=self.now.options)
        return Inquiry(chosen, facts, self._rescorer, self.limits, rows)

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

    def ask(self, options: ScoreOptions, trajectories: Sequence[Trajectory] | None = None, reading: str = "") -> Answer:
        """Score again under other circumstances; `trajectories`: the same tokens with other labels."""
        return self.answer(
            options, self.select(self._rescorer.score(trajectories or self.trajectories, options)), reading
        )

    def scores_of(self, trajectories: Sequence[Trajectory], options: ScoreOptions) -> list[NDArray[np.float32]]:
        """[T] nats each of other trajectories, in one question."""
        return self._rescorer.score(trajectories, options)

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

    def answer(self, options: ScoreOptions, values: NDArray[np.float32], reading: str = "") -> Answer:
        """What `values` [n] leave of the gap."""
        gaps = np.where(np.isnan(values), self.now.gaps, _gaps(values, self._log))
        return Answer(options=options, values=values, gaps=gaps, reading=reading)

    def closes(self, answer: Answer) -> float:
        """Nats of what is left that this answer explains; negative where it makes matters worse."""
        return self.now.left - answer.left

    def best(self, candidates: Mapping[ScoreOptions, str], enough: float) -> Answer | None:
        """The answer that closes most; asking stops at the first one that closes the share `enough` of what is left.
        `candidates`: options -> reading."""
        return self.best_of((self.ask(options, reading=reading) for options, reading in candidates.items()), enough)

    def best_by_span(self, candidates: Mapping[ScoreOptions, str], enough: float) -> Answer | None:
        """As `best`, where a candidate holds for some spans, or from a token of a span on, and the rest stays as it is:
        a fault begins, or touches a share."""
        answers = (self.begun(self.ask(options, reading=reading)) for options, reading in candidates.items())
        return self.best_of(answers, enough)

    def begun(self, answer: Answer) -> Answer:
        """In each span the present answer up to the token from which on `answer` leaves less: from its first, from
        none, or from one in between."""
        taken = np.zeros(self.now.gaps.size, dtype=np.bool_)
        for start, end in self.spans():
            gained = np.cumsum((self.now.gaps[start:end] - answer.gaps[start:end])[::-1])[::-1]
            first = int(gained.argmax())
            taken[start + first : end] = gained[first] > 0.0
        values, gaps = (
            np.where(taken, theirs, mine)
            for theirs, mine in ((answer.values, self.now.values), (answer.gaps, self.now.gaps))
        )
        return Answer(options=answer.options, values=values, gaps=gaps, reading=answer.reading)

    def spans(self) -> list[tuple[int, int]]:
        """[start, end) among the tokens in question, of each span of each trajectory."""
        spans = self.select(_numbered(self.trajectories, lambda index, span: (index, span.start)))
        return list(pairwise([0, *(int(cut) + 1 for cut in np.flatnonzero(np.diff(spans))), spans.size]))

    def best_of(self, answers: Iterable[Answer], enough: float) -> Answer | None:
        """The answer that closes most, with the stop of `best`."""
        best = None
        for answer in answers:
            best = answer if best is None or answer.left < best.left else best
            if self.closes(answer) >= enough * self.now.left:
                break
        return best

    def keep(self, cause: GapCause, answer: Answer | None, share: float) -> bool:
        """Accept an answer that closes at least this share of the whole gap; later questions are asked under its
        options."""
        if answer is None or not self.explain(cause, self.closes(answer), share, answer.reading):
            return False
        self.now = answer
        return True

    def explain(self, cause: GapCause, nats: float, share: float = 0.0, reading: str = "") -> bool:
        """Whether this is an explanation; then it is noted."""
        if nats <= 0.0 or nats < share * self.gap:
            return False
        self._parts.append((cause, nats))
        self._readings.append(reading)
        return True

    def result(self) -> Attribution:
        """What has been explained, and the rest."""
        return Attribution(
            gap=self.gap,
            parts=tuple(self._parts),
            residual=max(0.0, self.gap - math.fsum(nats for _, nats in self._parts)),
            readings=tuple(self._readings),
        )


def num_affordable(trajectories: Sequence[Trajectory], max_tokens: int) -> int:
    """How many of the first trajectories have at most `max_tokens` tokens together; at least one."""
    total = np.cumsum([t.token_ids.size for t in trajectories])
    return max(1, int(np.count_nonzero(total <= max_tokens)))


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
