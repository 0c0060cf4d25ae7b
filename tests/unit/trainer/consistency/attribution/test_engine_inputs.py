"""Prompts that an engine of another framework may have read in place of those of a dump."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from support.builders import BASE, build_trajectory
from support.consistency.attribution_room import LIMITS

from rollout.types.trajectory import Trajectory
from trainer.consistency.attribution.attribution import attribute
from trainer.consistency.attribution.engine_inputs import SEARCH_TOKENS, padded_widths
from trainer.consistency.attribution.inquiry import AttributionFacts, InputFacts
from trainer.consistency.checks.tokens import behind_other_prompt, num_given
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.types.evidence import Attribution, GapCause

PAD, BOS = 30, 31
Prompt = NDArray[np.int32]
Read = Callable[[int, Prompt], tuple[Sequence[int] | Prompt, tuple[int, int]]]
"""(row, its prompt) -> ids that the engine read, and the jump of its positions."""


class PrefixRescorer:
    """A token's log-prob is a number of all ids before it and of its own position."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def score(self, trajectories: Sequence[Trajectory], options: ScoreOptions) -> list[NDArray[np.float32]]:
        self.tokens.append(sum(t.token_ids.size for t in trajectories))
        jumps = options.jumps or ((0, 0),) * len(trajectories)
        return [self._row(t, jump) for t, jump in zip(trajectories, jumps, strict=True)]

    def _row(self, t: Trajectory, jump: tuple[int, int]) -> NDArray[np.float32]:
        inputs = np.arange(t.token_ids.size)
        places = inputs + np.where(inputs >= jump[0], jump[1], 0)
        before = np.cumsum((t.token_ids + 1) * (7 + places)) - (t.token_ids + 1) * (7 + places)
        return np.where(t.sampled, -((before * 2654435761 % 997) / 200.0), 0.0).astype(np.float32)


def rows(lengths: Sequence[int]) -> list[Trajectory]:
    """Prompts of these lengths behind a begin token, and 20 sampled tokens."""
    found: list[Trajectory] = []
    for index, length in enumerate(lengths):
        one = build_trajectory(index=index, prompt_tokens=length, spans=((BASE, 20),), vocab_size=30)
        ids = np.concatenate([[BOS], one.token_ids[:length]]).astype(np.int32)
        found.append(behind_other_prompt(one, ids))
    return found


def read_as(dump: list[Trajectory], read: Read, **facts: int | None) -> Attribution:
    """The attribution of a dump whose engine read something else."""
    rescorer = PrefixRescorer()
    logged: list[Trajectory] = []
    for index, one in enumerate(dump):
        ids, jump = read(index, one.token_ids[: num_given(one)])
        truth = behind_other_prompt(one, np.array(ids, dtype=np.int32))
        scores = rescorer.score([truth], ScoreOptions(jumps=(jump,)))[0][-20:]
        log = np.concatenate([np.zeros(num_given(one), dtype=np.float32), scores])
        logged.append(replace(one, rollout_logprobs=log))
    inputs = InputFacts(
        pad_ids=(PAD,),
        bos_id=BOS,
        max_context=facts.get("max_context"),
        widths=padded_widths([num_given(one) for one in dump]),
    )
    found = attribute(logged, AttributionFacts(inputs=inputs), rescorer, LIMITS)
    assert found is not None
    return found


LENGTHS = (3, 9, 4, 7, 5, 6, 8, 4, 11, 3, 5, 12)


def longest(index: int, rows_a_batch: int) -> int:
    first = index // rows_a_batch * rows_a_batch
    return 1 + max(LENGTHS[first : first + rows_a_batch])


ENGINES: dict[str, tuple[Read, str]] = {
    "doubled begin": (lambda index, p: ([BOS, *p], (0, 0)), f"one begin token ({BOS}) more"),
    "no begin": (lambda index, p: (p[1:], (0, 0)), f"did not read the begin token ({BOS})"),
    "padded to the longest": (
        lambda index, p: ([PAD] * (13 - p.size) + list(p), (0, 0)),
        "in front of the prompts, to the longest of all",
    ),
    "padded in fours": (
        lambda index, p: ([PAD] * (longest(index, 4) - p.size) + list(p), (0, 0)),
        "in front of the prompts, to the longest of each 4 rows",
    ),
    "padded behind": (
        lambda index, p: ([*p, *[PAD] * (13 - p.size)], (0, 0)),
        "behind the prompts, to the longest of all",
    ),
    "positions of all": (
        lambda index, p: (p, (0, 16 - p.size)),
        "positions count pads in front of the prompts, to a multiple of 16",
    ),
    "positions of answers": (
        lambda index, p: (p, (p.size, 13 - p.size)),
        "positions count pads between prompts and answers, to the longest of all",
    ),
}


@pytest.mark.parametrize("name", ENGINES)
def test_what_the_engine_read_is_named(name: str):
    read, reading = ENGINES[name]
    found = read_as(rows(LENGTHS), read)
    assert found.first is GapCause.TOKENIZER and found.explained > 0.999 and reading in found.readings[0]


def test_pads_of_the_dump_that_the_engine_did_not_read_are_named():
    padded = [
        behind_other_prompt(
            one, np.array([PAD] * (13 - num_given(one)) + list(one.token_ids[: num_given(one)]), np.int32)
        )
        for one in rows(LENGTHS)
    ]
    found = read_as(padded, lambda index, p: (p[p != PAD], (0, 0)))
    assert found.first is GapCause.TOKENIZER and "begin with pads that the engine did not read" in found.readings[0]


def test_other_prompts_are_not_named():
    rng = np.random.default_rng(0)
    found = read_as(rows(LENGTHS), lambda index, p: (rng.integers(30, size=p.size).tolist(), (0, 0)))
    assert found.parts == ()


def test_no_row_is_made_longer_than_the_context():
    found = read_as(rows(LENGTHS), lambda index, p: ([BOS, *p], (0, 0)), max_context=24)
    assert found.first is GapCause.UNKNOWN  # most rows of 24 and more tokens have no room for one token more


def test_prompts_are_tried_on_a_few_rows():
    dump, rescorer = rows(LENGTHS * 20), PrefixRescorer()
    log = rescorer.score(dump, ScoreOptions())
    wrong = [replace(one, rollout_logprobs=row - one.sampled) for one, row in zip(dump, log, strict=True)]
    widths = padded_widths([num_given(one) for one in dump])
    inputs = InputFacts(pad_ids=(PAD,), bos_id=BOS, max_context=None, widths=widths)
    rescorer.tokens.clear()
    attribute(wrong, AttributionFacts(inputs=inputs), rescorer, LIMITS)
    tried = [tokens for tokens in rescorer.tokens if tokens < sum(t.token_ids.size for t in dump)]
    assert 0 < sum(tried) < 5 * SEARCH_TOKENS * len(widths)


def test_prompts_are_padded_to_the_longest_of_all_or_of_a_batch_or_to_a_multiple():
    widths = padded_widths([3, 9, 4, 20])
    assert widths["to the longest of all"] == (20,) * 4 and widths["to the longest of each 2 rows"] == (9, 9, 20, 20)
    assert widths["to a multiple of 8"] == (8, 16, 8, 24)
    assert len(set(widths.values())) == len(widths)
