"""Later turns whose prefix went through text: the engine continued other ids than the sample holds."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from support.builders import build_trajectory
from support.consistency.attribution_room import AS_LOGGED, TableRescorer, V, ask, parts

from rollout.types.trajectory import Trajectory, VersionSpan
from trainer.consistency.attribution.inquiry import AttributionFacts
from trainer.consistency.checks.tokens import later_turns
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.types.evidence import GapCause


class ThroughTextRescorer(TableRescorer):
    """Later turns agree with the log only behind a prefix without token 1."""

    def score(self, trajectories: Sequence[Trajectory], options: ScoreOptions) -> list[NDArray[np.float32]]:
        self.asked.append(options)
        rows: list[NDArray[np.float32]] = []
        for each in trajectories:
            row = each.rollout_logprobs.copy()
            for start, end in later_turns(each):
                row[start:end] -= np.float32(0.5 if 1 in each.token_ids[:start] else 0.0)
            rows.append(row)
        return rows


def two_turns(ends: int) -> Trajectory:
    """A turn that ends with token `ends`, two given tokens, and another turn."""
    built = build_trajectory(spans=((V[2], 4), (V[3], 6)))
    ids = np.where(built.token_ids == 1, 2, built.token_ids).astype(np.int32)
    ids[7] = ends
    sampled, logprobs = built.sampled.copy(), built.rollout_logprobs.copy()
    sampled[8:10], logprobs[8:10] = False, 0.0
    spans = (VersionSpan(V[2], 4, 8), VersionSpan(V[3], 10, 14))
    return replace(built, token_ids=ids, sampled=sampled, rollout_logprobs=logprobs, version_spans=spans, turns=2)


def without_ones(ids: NDArray[np.int32]) -> NDArray[np.int32]:
    return ids[ids != 1]


def test_a_later_turn_whose_prefix_went_through_text_is_the_tokenizers():
    facts = AttributionFacts(through_text=without_ones)
    found = ask(ThroughTextRescorer({}), two_turns(1), facts=facts)
    assert parts(found) == {GapCause.TOKENIZER: 0.25}  # four of eight tokens
    assert found.explained == pytest.approx(1.0)


def test_turns_that_text_gives_back_as_they_were_are_not_asked_about():
    rescorer = TableRescorer({AS_LOGGED: [0.0] * 4 + [0.5] * 4})
    ask(rescorer, two_turns(2), facts=AttributionFacts(through_text=without_ones))
    assert rescorer.tokens[0] == 14
    assert set(rescorer.tokens) == {14}  # no question behind another prefix


def test_a_gap_that_is_no_larger_in_later_turns_is_not_the_prefixs():
    rescorer = TableRescorer({AS_LOGGED: 0.5})
    ask(rescorer, two_turns(1), facts=AttributionFacts(through_text=without_ones))
    assert set(rescorer.tokens) == {14}
