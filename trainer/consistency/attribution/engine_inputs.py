"""Whether the engine read other ids, or at other positions, than the dump says: pads, a begin token, turns that went
through text. Pure numpy.

It owns which prompts are tried. They are tried on a few rows, all that are alike in one question, and the best is asked
about on all tokens in question.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import Trajectory
from trainer.consistency.attribution.inquiry import CLOSED_SHARE, Answer, InputFacts, Inquiry
from trainer.consistency.checks.tokens import behind_other_prompt, is_later, num_given
from trainer.types.evidence import GapCause

SEARCH_TOKENS = 512
"""Tokens of the rows on which prompts are tried."""
ALIKE = 0.99
"""Prompts that close this share of what the best one closes on a few rows are asked about on all."""
MOST_ALIKE = 4
BOUNDARY_FACTOR = 2.0
"""Later turns differ by this many times what the first one does, where they went through text."""

_Prompt = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """Something that the engine may have read in place of the prompts, in words, and for row `index`: its prompt, and
    the jump (first input, number) of its positions."""

    reading: str
    prompt: Callable[[int, _Prompt], _Prompt] = lambda index, prompt: prompt
    jump: Callable[[int, _Prompt], tuple[int, int]] = lambda index, prompt: (0, 0)


def ask_through_text(inquiry: Inquiry) -> bool:
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


def ask_inputs(inquiry: Inquiry) -> bool:
    """Whether the engine read other prompts than those of a dump."""
    facts = inquiry.facts.inputs
    if facts is None:
        return False
    part = inquiry.part(SEARCH_TOKENS)
    promising: list[tuple[float, _Other]] = []
    for alike in (_edits(facts), _pads(facts), _positions(facts)):
        promising += zip((part.closes(answer) for answer in _answers(part, facts, alike)), alike, strict=True)
        if promising and max(closed for closed, _ in promising) >= CLOSED_SHARE * part.now.left:
            break
    most = max(closed for closed, _ in promising)
    if most < CLOSED_SHARE * part.now.left:
        return False
    alike = [other for closed, other in promising if closed >= ALIKE * most][:MOST_ALIKE]
    answers = (next(_answers(inquiry, facts, [other])) for other in alike)
    return inquiry.keep(GapCause.TOKENIZER, inquiry.best_of(answers, ALIKE), CLOSED_SHARE)


def _answers(inquiry: Inquiry, facts: InputFacts, others: Sequence[_Other]) -> Iterator[Answer]:
    """What is left where each of `others` was read, in one question. Rows that would be longer than the context stay as
    they are."""
    trajectories = inquiry.trajectories
    changed: list[Trajectory] = []
    jumps: list[tuple[int, int]] = []
    for other in others:
        for index, trajectory in enumerate(trajectories):
            given = trajectory.token_ids[: num_given(trajectory)]
            prompt, jump = other.prompt(index, given), other.jump(index, given)
            length = trajectory.token_ids.size - given.size + prompt.size + jump[1]
            fits = prompt.size > 0 and (facts.max_context is None or length <= facts.max_context)
            changed.append(behind_other_prompt(trajectory, prompt) if fits else trajectory)
            jumps.append(jump if fits else (0, 0))
    options = replace(inquiry.now.options, replay_routing=False, jumps=tuple(jumps) if any(jumps) else ())
    scores = inquiry.scores_of(changed, options) if changed else []
    for place, other in enumerate(others):
        rows = scores[place * len(trajectories) : (place + 1) * len(trajectories)]
        placed = [
            np.concatenate([np.zeros(num_given(t), dtype=np.float32), row[-(t.token_ids.size - num_given(t)) :]])
            for t, row in zip(trajectories, rows, strict=True)
        ]
        yield inquiry.answer(inquiry.now.options, inquiry.select(placed), other.reading)


def _edits(facts: InputFacts) -> list[_Other]:
    """Tokens that stand in the dump and that the engine did not read, and the begin token."""
    others = [
        _Other(
            reading="the dump's rows begin with pads that the engine did not read",
            prompt=lambda index, prompt: prompt[_num_leading(prompt, facts) :],
        ),
        _Other(
            reading="pads stand between prompt and answer in the dump, and the engine did not read them",
            prompt=lambda index, prompt: prompt[: prompt.size - _num_leading(prompt[::-1], facts)],
        ),
    ]
    bos = facts.bos_id
    if bos is not None:
        others += [
            _Other(
                reading=f"the engine read one begin token ({bos}) more than the dump holds",
                prompt=lambda index, prompt: np.concatenate([np.array([bos], dtype=np.int32), prompt]),
            ),
            _Other(
                reading=f"the engine did not read the begin token ({bos}) of the dump",
                prompt=lambda index, prompt: prompt[1:] if prompt.size and prompt[0] == bos else prompt,
            ),
        ]
    return others


def _num_leading(prompt: _Prompt, facts: InputFacts) -> int:
    """Pads at the begin of a prompt: all that are the same id, where that is one of a pad or stands there at least
    twice; one begin token stays."""
    differs = np.flatnonzero(prompt != prompt[0]) if prompt.size else np.zeros(0)
    run = int(differs[0]) if differs.size else 0
    if not run or (run == 1 and prompt[0] not in facts.pad_ids):
        return 0
    return run - 1 if prompt[0] == facts.bos_id else run


def _pads(facts: InputFacts) -> list[_Other]:
    """Pads that the engine attended to."""

    def fill(index: int, prompt: _Prompt, widths: Sequence[int], pad: int) -> _Prompt:
        return np.full(max(0, widths[index] - prompt.size), pad, dtype=np.int32)

    others: list[_Other] = []
    for how, widths in facts.widths.items():
        for pad in facts.pad_ids:
            others += [
                _Other(
                    reading=f"the engine attended to pads ({pad}) in front of the prompts, {how}",
                    prompt=lambda index, prompt, widths=widths, pad=pad: np.concatenate(
                        [fill(index, prompt, widths, pad), prompt]
                    ),
                ),
                _Other(
                    reading=f"the engine attended to pads ({pad}) behind the prompts, {how}",
                    prompt=lambda index, prompt, widths=widths, pad=pad: np.concatenate(
                        [prompt, fill(index, prompt, widths, pad)]
                    ),
                ),
            ]
    return others


def _positions(facts: InputFacts) -> list[_Other]:
    """Pads that nothing attended to, and that positions count."""
    others: list[_Other] = []
    for how, widths in facts.widths.items():
        others += [
            _Other(
                reading=f"the engine's positions count pads in front of the prompts, {how}",
                jump=lambda index, prompt, widths=widths: (0, max(0, widths[index] - prompt.size)),
            ),
            _Other(
                reading=f"the engine's positions count pads between prompts and answers, {how}",
                jump=lambda index, prompt, widths=widths: (prompt.size, max(0, widths[index] - prompt.size)),
            ),
        ]
    return others


def padded_widths(prompts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """How prompts of these lengths, in the order of a dump, may have been padded: in words -> the width of each. None
    is wider than four times the longest."""
    lengths = np.array(prompts, dtype=np.int64)
    found: dict[str, NDArray[np.int64]] = {"to the longest of all": np.full(lengths.size, lengths.max(initial=0))}
    for rows in (2, 4, 8, 16, 32, 64):
        if rows < lengths.size:
            longest = np.maximum.reduceat(lengths, np.arange(0, lengths.size, rows))
            found[f"to the longest of each {rows} rows"] = np.repeat(longest, rows)[: lengths.size]
    for multiple in (
        multiple for multiple in (8, 16, 32, 64, 128, 256, 512, 1024) if multiple < 4 * lengths.max(initial=0)
    ):
        found[f"to a multiple of {multiple}"] = -(-lengths // multiple) * multiple
    distinct: dict[tuple[int, ...], str] = {}
    for how, widths in found.items():
        distinct.setdefault(tuple(widths.tolist()), how)
    return {how: widths for widths, how in distinct.items()}
