"""How often samples of a group repeat each other, against how often they would by chance."""

from dataclasses import replace

import numpy as np
import pytest
from support.builders import build_dispatch, build_group

from rollout.types.trajectory import TrajectoryGroup
from trainer.batching.repeats import sample_repeats

CHANCES = np.array([0.5, 0.3, 0.2])
"""Of the three answers that there are."""


def drawn(random: np.random.Generator, group: int, samples: int, *, one_seed: bool) -> TrajectoryGroup:
    """Answers of one token, each with the log-prob that it was drawn with."""
    made = build_group(build_dispatch(group), [0.0] * samples, spans=((build_dispatch().policy, 1),))
    answers = np.repeat(random.choice(3, p=CHANCES), samples) if one_seed else random.choice(3, samples, p=CHANCES)
    trajectories = []
    for trajectory, answer in zip(made.trajectories, answers.tolist(), strict=True):
        tokens, logprobs = trajectory.token_ids.copy(), trajectory.rollout_logprobs.copy()
        tokens[-1], logprobs[-1] = answer, np.log(CHANCES[answer])
        trajectories.append(replace(trajectory, token_ids=tokens, rollout_logprobs=logprobs))
    return replace(made, trajectories=tuple(trajectories))


def test_independent_samples_repeat_as_often_as_their_probabilities_say():
    random = np.random.default_rng(0)
    repeats, expected = sample_repeats(drawn(random, number, 8, one_seed=False) for number in range(200))
    assert expected == pytest.approx(float((CHANCES**2).sum()), abs=0.01)
    assert repeats == pytest.approx(expected, abs=0.03)


def test_samples_of_one_seed_repeat_always():
    random = np.random.default_rng(0)
    repeats, expected = sample_repeats(drawn(random, number, 8, one_seed=True) for number in range(200))
    assert repeats == 1.0
    assert expected == pytest.approx(float((CHANCES**2).sum()), abs=0.05)


def test_groups_of_one_sample_have_no_pair():
    assert sample_repeats([build_group(rewards=[1.0])]) == (0.0, 0.0)
