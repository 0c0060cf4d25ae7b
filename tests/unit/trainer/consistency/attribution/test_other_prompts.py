"""The same answer behind another prompt, or behind other ids of the turns before: what belongs to a token stays with
it."""

from dataclasses import replace

import numpy as np
from support.builders import BASE, build_trajectory

from rollout.types.supports import TokenSupports
from rollout.types.trajectory import Trajectory, VersionSpan
from trainer.consistency.checks.tokens import behind_other_prompt, num_given, other_prefixes


def listed() -> Trajectory:
    """Four given tokens, two turns of three tokens with one given between them; a token's support is itself."""
    built = build_trajectory(spans=((BASE, 3), (BASE, 4)))
    sampled, logprobs = built.sampled.copy(), built.rollout_logprobs.copy()
    sampled[7], logprobs[7] = False, 0.0
    return replace(
        built,
        sampled=sampled,
        rollout_logprobs=logprobs,
        version_spans=(VersionSpan(BASE, 4, 7), VersionSpan(BASE, 8, 11)),
        supports=TokenSupports(counts=sampled.astype(np.uint8), ids=built.token_ids[sampled]),
    )


def itself(trajectory: Trajectory) -> bool:
    supports = trajectory.supports
    return supports is not None and np.array_equal(supports.ids, trajectory.token_ids[trajectory.sampled])


def test_an_answer_behind_another_prompt_keeps_its_log_probs_versions_and_supports():
    one = listed()
    moved = behind_other_prompt(one, np.array([9, 8, 7, 6, 5, 4], dtype=np.int32))
    assert num_given(moved) == 6 and moved.token_ids[:6].tolist() == [9, 8, 7, 6, 5, 4]
    assert np.array_equal(moved.token_ids[6:], one.token_ids[4:]) and itself(moved)
    assert np.array_equal(moved.rollout_logprobs[moved.sampled], one.rollout_logprobs[one.sampled])
    assert [(span.start, span.end) for span in moved.version_spans] == [(6, 9), (10, 13)]


def test_a_turn_behind_other_ids_keeps_its_supports():
    one = listed()
    other = other_prefixes([one], lambda ids: np.append(ids, np.int32(3)))[0].trajectory
    assert itself(other) and np.array_equal(other.token_ids[other.sampled], one.token_ids[8:11])
