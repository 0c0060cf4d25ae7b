"""What the doctor reads of groups: how much slower the slowest replica is, and how far the reward follows length within
groups."""

import numpy as np
import pytest

from orchestrator.dispatch.accounts import reward_length_correlation
from orchestrator.dispatch.replica_speeds import LEAST, ReplicaSpeeds
from rollout.types.trajectory import FinishReason, GroupHeader, TrajectoryHeader
from rollout.types.weights import PolicyVersion

UNMEASURED = {"replica_slowness": -1.0, "slowest_replica": -1.0}


def fed(seconds: dict[int, float], groups: int = LEAST) -> ReplicaSpeeds:
    speeds = ReplicaSpeeds()
    for replica, each in seconds.items():
        for _ in range(groups):
            speeds.add(replica, each)
    return speeds


def test_the_slowest_replica_is_held_against_the_median_of_the_others():
    assert fed({0: 1.0, 1: 3.0, 2: 2.0}).columns() == {"replica_slowness": 2.0, "slowest_replica": 1.0}


def test_one_replica_has_no_others():
    assert fed({0: 1.0}).columns() == UNMEASURED


def test_before_every_replica_has_enough_groups_nothing_is_compared():
    speeds = fed({0: 1.0, 1: 3.0})
    speeds.add(2, 9.0)
    assert speeds.columns() == UNMEASURED


def test_one_slow_group_makes_no_slow_replica():
    speeds = fed({0: 1.0, 1: 1.0}, groups=12)
    speeds.add(1, 100.0)
    assert speeds.columns()["replica_slowness"] == 1.0


def group(pairs: list[tuple[float, int]]) -> GroupHeader:
    trajectories = tuple(
        TrajectoryHeader(
            trajectory_id=f"d-{index}",
            num_tokens=length + 4,
            num_sampled=length,
            tokens_by_policy=((PolicyVersion(1, 0), length),),
            reward=reward,
            finish_reason=FinishReason.STOP,
        )
        for index, (reward, length) in enumerate(pairs)
    )
    return GroupHeader(
        dispatch_id="d",
        prompt_id="p",
        pass_index=0,
        replica=0,
        trajectories=trajectories,
        generation_s=1.0,
        reward_s=0.0,
        num_bytes=1,
    )


def test_a_reward_that_is_length_correlates_fully_whatever_the_groups_levels():
    assert reward_length_correlation([group([(1.0, 10), (2.0, 20)]), group([(5.0, 3), (6.0, 13)])]) == pytest.approx(
        1.0
    )
    assert reward_length_correlation([group([(1.0, 20), (2.0, 10)])]) == pytest.approx(-1.0)


def test_lengths_that_only_differ_between_prompts_correlate_with_nothing():
    assert reward_length_correlation([group([(1.0, 5), (1.0, 5)]), group([(0.0, 50), (0.0, 50)])]) == 0.0


def test_the_correlation_is_pearsons_of_what_is_left_in_the_groups():
    rng = np.random.default_rng(0)
    rewards, lengths = rng.normal(size=64), rng.integers(1, 50, size=64)
    found = reward_length_correlation([group([(float(r), int(n)) for r, n in zip(rewards, lengths, strict=True)])])
    assert found == pytest.approx(float(np.corrcoef(rewards, lengths)[0, 1]))
