"""Which distribution the log belongs to: one that is declared, one that the model's files name, or one whose value is
estimated from the log-probs themselves. Pure numpy.

    declared alternatives -> usual sampling -> temperature -> top-p and top-k -> the likeliest token's

It owns these questions and the estimates; what counts as an explanation is the inquiry's.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trainer.consistency.attribution.inquiry import CLOSED_SHARE, Answer, Inquiry, UsualSampling
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.types.evidence import GapCause

SEARCH_TOKENS = 2048
"""Tokens of one question while a value is searched; the value found is asked about on all tokens in question."""
RAISED_SHARE = 0.95
"""Truncation is asked about where at least this share of the tokens is logged as likelier: the kept tokens have more of
the mass."""
ALL_BUT_ROUNDING = 0.98
"""An answer that closes this share ends the search for a better one: a temperature that is not declared may be near
one that is."""
FITTED_SHARE = 0.9
"""A temperature that was fitted must close more than one that somebody declares: it bends to other causes."""
PROMISE = 0.2
"""The search for a temperature goes on while a straight line through its answers closes this share of the gap."""
TEMPERATURE_QUESTIONS = 8
COLDEST, HOTTEST = 0.02, 50.0
LARGEST_VOCABULARY = 2**20
ROUNDING_SHARE = 0.1
"""A mean difference below this share of the floor is rounding to the search for top-k."""
_MASS_ROUNDING = 2e-6
"""Relative: kept masses are known to the rounding of float32 log-probs."""


def ask_semantics(inquiry: Inquiry) -> bool:
    """Whether the log belongs to another distribution than its tags say."""
    tags, base = [t.tag for t in inquiry.trajectories], inquiry.now.options
    truncated = any(tag.top_p < 1.0 or tag.top_k > 0 for tag in tags)
    candidates: dict[ScoreOptions, str] = {}
    if truncated:
        candidates[replace(base, truncate=False)] = "log-probs before top-p and top-k"
    if any(tag.temperature != 1.0 for tag in tags):
        candidates[replace(base, temperature=1.0, truncate=not truncated)] = "raw log-probs, at temperature 1"
    usual = {
        replace(base, temperature=each.temperature, top_p=each.top_p, top_k=each.top_k): each.reading
        for each in inquiry.facts.usual
    }
    questions: tuple[Callable[[], Answer | None], ...] = (
        lambda: inquiry.best_by_span(candidates, 1.0),
        lambda: inquiry.best_by_span(usual, ALL_BUT_ROUNDING),
        lambda: _temperature(inquiry),
        lambda: _truncation(inquiry, truncated),
        lambda: _likeliest(inquiry),
    )
    if not inquiry.facts.canary_holds:
        questions = questions[:1]  # its weights are others: what is not declared has no estimate
    answers = (answer for question in questions if (answer := question()) is not None)
    return inquiry.keep(GapCause.LOGPROB_SEMANTICS, inquiry.best_of(answers, ALL_BUT_ROUNDING), CLOSED_SHARE)


def usual_sampling(recommended: Mapping[str, float]) -> tuple[UsualSampling, ...]:
    """What engines make of the sampling that a model's generation_config.json recommends, where nobody tells them
    otherwise: vLLM keeps all tokens where it names no top_k, transformers 50."""
    temperature, top_p = recommended.get("temperature", 1.0), recommended.get("top_p", 1.0)
    if not temperature > 0.0 or not 0.0 < top_p <= 1.0 or (temperature == 1.0 and top_p == 1.0):
        return ()
    counts = dict.fromkeys([int(recommended["top_k"])] if "top_k" in recommended else [0, 50])
    return tuple(
        UsualSampling(
            reading=f"sampled as generation_config.json recommends: temperature {temperature:g}, top_p {top_p:g}, "
            f"top_k {top_k}",
            temperature=temperature,
            top_p=top_p,
            top_k=max(0, top_k),
        )
        for top_k in counts
    )


def _temperature(inquiry: Inquiry) -> Answer | None:
    """The temperature that the log fits best, searched on a part: a token's log-prob is a smooth curve in the inverse
    temperature, and all tokens meet their log at the same one."""
    part = inquiry.part(SEARCH_TOKENS)
    best = min(_temperatures(part), key=lambda answer: answer.left, default=None)
    if best is None or best.options.temperature is None or part.closes(best) < FITTED_SHARE * part.now.left:
        return None
    declared = sorted({t.tag.temperature for t in inquiry.trajectories})
    found: list[Answer] = []
    for value in dict.fromkeys((round(best.options.temperature, 2), best.options.temperature)):
        reading = f"temperature {value:.3g}, where {' and '.join(f'{each:g}' for each in declared[:3])} is declared"
        found.append(inquiry.begun(inquiry.ask(replace(best.options, temperature=value), reading=reading)))
        if inquiry.closes(found[-1]) >= ALL_BUT_ROUNDING * inquiry.now.left:
            break
    return min(found, key=lambda answer: answer.left)


def _temperatures(part: Inquiry) -> Iterator[Answer]:
    """Answers at temperatures that come closer: Gauss-Newton, with slopes from the two answers before."""
    tags = np.repeat([1.0 / t.tag.temperature for t in part.trajectories], part.counts)
    log, off = part.log.astype(np.float64), part.now.gaps > part.floor
    before, old = tags, part.now.values.astype(np.float64)
    inverse = 0.8 * float(tags.min())
    for question in range(TEMPERATURE_QUESTIONS):
        answer = part.ask(replace(part.now.options, temperature=1.0 / inverse))
        yield answer
        new = answer.values.astype(np.float64)
        known = off & np.isfinite(old) & np.isfinite(new) & (before != inverse)
        slopes = (new[known] - old[known]) / (inverse - before[known])
        wanted = log[known] - new[known]
        if not slopes.any():
            return
        step = float(slopes @ wanted / (slopes @ slopes))
        promised = np.abs(wanted - slopes * step).sum()
        if question == 0 and promised > (1.0 - PROMISE) * part.now.gaps[known].sum():
            return
        moved = float(np.clip(inverse + step, max(inverse / 3.0, 1.0 / HOTTEST), min(inverse * 3.0, 1.0 / COLDEST)))
        if abs(moved - inverse) <= 1e-5 * inverse:
            return
        before, old, inverse = np.full(tags.shape, inverse), new, moved


def _truncation(inquiry: Inquiry, declared: bool) -> Answer | None:
    """A nucleus or a number of likeliest tokens other than declared. The log of a kept token is raised by the mass that
    was cut, so e^(log-prob before truncation - log) is the mass that was kept."""
    base = inquiry.now.options
    whole = inquiry.ask(replace(base, truncate=False)) if declared else inquiry.now
    raised = inquiry.log.astype(np.float64) - whole.values.astype(np.float64)
    if not _is_raised(inquiry, raised):
        return None
    kept = np.exp(-raised)
    lowest = float(kept[np.isfinite(kept)].min(initial=1.0)) * (1.0 - _MASS_ROUNDING)
    return inquiry.best_of(_truncations(inquiry, whole, lowest), ALL_BUT_ROUNDING)


def _truncations(inquiry: Inquiry, whole: Answer, lowest: float) -> Iterator[Answer]:
    """A nucleus keeps at least `top_p` of the mass at every token: the least mass that was kept is as good as the
    nucleus itself, for these tokens. A number of tokens is searched by halving."""
    base = inquiry.now.options
    plain = math.floor(lowest * 100.0 + 0.01) / 100.0
    for top_p, about in ((plain, ""), (lowest, "about ")):
        if 0.0 < top_p < 1.0:
            reading = f"truncated to top_p {about}{top_p:.3g}, which is not declared"
            yield inquiry.begun(inquiry.ask(replace(base, top_p=top_p, top_k=0), reading=reading))
    top_k = _top_k(inquiry.part(SEARCH_TOKENS))
    if top_k is not None:
        reading = f"truncated to top_k {top_k}, which is not declared"
        yield inquiry.begun(inquiry.ask(replace(base, top_p=1.0, top_k=top_k), reading=reading))


def _top_k(part: Inquiry) -> int | None:
    """The number of likeliest tokens that raises log-probs as much as the log, on average: the more are kept, the lower
    they are. None where even the most does not lower them to the log."""
    base, log = part.now.options, part.log.astype(np.float64)

    def too_few(top_k: int) -> bool:
        values = part.ask(replace(base, top_p=1.0, top_k=top_k)).values.astype(np.float64)
        return float(np.nanmean(values - log)) > ROUNDING_SHARE * part.floor

    few, many = 1, 8
    while too_few(many):
        few, many = many, many * 8
        if many > LARGEST_VOCABULARY:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if too_few(middle) else (few, middle)
    return many


def _likeliest(inquiry: Inquiry) -> Answer | None:
    """The log-prob of the likeliest token at each position, whichever was sampled."""
    raised = inquiry.log.astype(np.float64) - inquiry.now.values.astype(np.float64)
    if not _is_raised(inquiry, raised):
        return None
    options = replace(inquiry.now.options, token="likeliest")
    return inquiry.ask(options, reading="log-probs of the likeliest token, not of the sampled one")


def _is_raised(inquiry: Inquiry, raised: NDArray[np.float64]) -> bool:
    """Whether next to no token is logged as less likely."""
    return bool((raised > -inquiry.floor).mean() >= RAISED_SHARE)
