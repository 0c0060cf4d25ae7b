"""Whether other number formats explain a gap: of the log-probs on their way, which costs no question, then of the
arithmetic, then of the weights. Pure numpy."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollout.published.number_formats import rounded_to_bf16
from trainer.consistency.attribution.inquiry import CLOSED_SHARE, KEPT_SHARE, ROUNDED_NATS, Answer, Inquiry
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.types.evidence import GapCause

ROUNDED_SHARE = 0.99
"""This share of the tokens must agree after rounding; a score a hair beside the middle of two grid points may round the
other way."""
LEAST_ON_GRID = 16
"""Tokens from where on a log all of whose entries are numbers of half precision was rounded to it."""
DType = Literal["float32", "bfloat16", "float16"]
_GRIDS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "bfloat16": rounded_to_bf16,
    "float16": lambda values: values.astype(np.float16).astype(np.float32),
}
"""Dtype -> the nearest number of it, for a log all of whose entries are such numbers."""
_DTYPES: dict[str, DType] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


def ask_precision(inquiry: Inquiry) -> None:
    """Keep the number formats that explain most, if they explain anything."""
    inquiry.keep(GapCause.PRECISION, inquiry.best_of(_answers(inquiry), CLOSED_SHARE), KEPT_SHARE)


def _answers(inquiry: Inquiry) -> Iterator[Answer]:
    """What is left where log-probs were rounded on their way; then in the declared dtype, in float32, with fp8 weights,
    and in half precision that nobody declared, with logits as they are and rounded as an engine's head rounds them."""
    sent = _rounded(inquiry, inquiry.now)
    if sent is not None:
        yield sent
    options, tag = inquiry.now.options, inquiry.trajectories[0].tag
    declared = _DTYPES.get(tag.weights_dtype)
    compute = options if declared is None else replace(options, dtype=declared)
    candidates: dict[ScoreOptions, str] = {}
    if declared is not None:
        candidates |= _with_logits(compute, "arithmetic in {}, as declared")
    candidates.setdefault(replace(options, dtype="float32"), "arithmetic in float32")
    candidates.setdefault(replace(compute, weights_dtype="float8_e4m3"), "weights in fp8")
    for dtype in ("bfloat16", "float16"):
        for each, reading in _with_logits(
            replace(options, dtype=dtype), "arithmetic in {}, which is not declared"
        ).items():
            candidates.setdefault(each, reading)
    candidates.pop(options, None)
    grid = next((dtype for dtype, on_grid in _GRIDS.items() if _all_on(on_grid, inquiry.log)), None)
    for each, reading in candidates.items():
        answer = inquiry.ask(each, reading=reading)
        yield _rounded(inquiry, answer) or answer
        if grid is not None and grid == each.dtype:
            yield inquiry.answer(each, _GRIDS[grid](answer.values), f"{reading}, log-probs too")


def _with_logits(options: ScoreOptions, reading: str) -> dict[ScoreOptions, str]:
    text = reading.format(options.dtype)
    if options.dtype == "float32":
        return {options: text}
    return {options: text, replace(options, round_logits=True): f"{text}, logits too"}


def _rounded(inquiry: Inquiry, answer: Answer) -> Answer | None:
    """The answer after transport in half precision, if where that helps the log then agrees with it to the last
    bit."""
    for dtype, on_grid in _GRIDS.items():
        values = np.where(np.isnan(answer.values), answer.values, on_grid(answer.values))
        reading = f"log-probs rounded to {dtype}" + (f"; {answer.reading}" if answer.reading else "")
        begun = inquiry.begun(inquiry.answer(answer.options, values, reading))
        helps = begun.gaps < answer.gaps
        agree = np.isfinite(values) & (begun.gaps <= ROUNDED_NATS)
        if helps.any() and agree[helps].mean() >= ROUNDED_SHARE:
            return begun
    return None


def _all_on(on_grid: Callable[[NDArray[np.float32]], NDArray[np.float32]], log: NDArray[np.float32]) -> bool:
    """Whether every entry of a log is a number of half precision, and there are enough to say so."""
    return log.size >= LEAST_ON_GRID and bool((on_grid(log) == log).all())
