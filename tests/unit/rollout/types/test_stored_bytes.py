"""What runs have written stays readable, and is written alike: an encoded group and the texts of the store's tables."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from support.builders import BASE, build_tag

from rollout.store.sqlite.records import dispatch_columns, dispatch_of, header_of_text, header_text
from rollout.types.codec import decode, encode
from rollout.types.dispatch import Dispatch
from rollout.types.prompts import Message, Prompt
from rollout.types.trajectory import (
    FinishReason,
    Reward,
    RoutingTrace,
    Timings,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
    header_of,
)
from rollout.types.weights import PolicyVersion

LATER = PolicyVersion(2, 7)


def trajectory(index: int, routing: RoutingTrace | None, largest_id: int) -> Trajectory:
    """Six tokens: three given, two of one policy, one of a later."""
    return Trajectory(
        trajectory_id=f"d-ä/{index}",
        dispatch_id="d-ä",
        prompt_id="p",
        environment="arithmetic",
        token_ids=np.array([1, 2, 3, 4, 5, largest_id], dtype=np.int32),
        sampled=np.array([0, 0, 1, 1, 0, 1], dtype=np.bool_),
        rollout_logprobs=np.array([0, 0, -0.5, -1.25, 0, -3e-8], dtype=np.float32),
        version_spans=(VersionSpan(BASE, 2, 4), VersionSpan(LATER, 5, 6)),
        turns=2,
        tag=build_tag(replica=index % 2),
        finish_reason=list(FinishReason)[index],
        timings=Timings(started_at_s=1.5, generation_s=0.1),
        routing=routing,
    )


def group(largest_id: int) -> TrajectoryGroup:
    """Two tags, three ends, traces of one and of two bytes an expert and none."""
    experts = np.arange(20).reshape(5, 2, 2)
    covered = np.array([1, 1, 0, 1, 1], dtype=np.bool_)
    traces = (
        RoutingTrace(experts=experts.astype(np.uint8), covered=covered),
        None,
        RoutingTrace(experts=(experts * 100).astype(np.uint16), covered=~covered),
    )
    rewards = (Reward(total=1.0, parts=(("right", 1.0), ("länge", -0.25))), Reward(total=0.0), Reward(total=1e-300))
    return TrajectoryGroup(
        dispatch_id="d-ä",
        prompt_id="p",
        pass_index=3,
        environment="arithmetic",
        trajectories=tuple(trajectory(index, trace, largest_id) for index, trace in enumerate(traces)),
        rewards=rewards,
        reward_s=0.125,
    )


STORED = {"narrow_ids": 1 << 15, "wide_ids": 1 << 20}
"""File of an encoded group -> its largest token id."""


@pytest.mark.parametrize("name", STORED)
def test_an_encoded_group_is_read_and_written_as_ever(name: str) -> None:
    stored, expected = (Path(__file__).parent / f"{name}.group").read_bytes(), group(STORED[name])
    assert encode(expected).payload.tobytes() == stored
    found = decode(stored)
    assert (found.dispatch_id, found.prompt_id, found.pass_index, found.environment, found.reward_s) == (
        *("d-ä", "p", 3, "arithmetic"),
        0.125,
    )
    assert found.rewards == expected.rewards
    for ours, theirs in zip(expected.trajectories, found.trajectories, strict=True):
        for field in fields(Trajectory):
            mine, other = getattr(ours, field.name), getattr(theirs, field.name)
            if isinstance(mine, np.ndarray):
                assert (mine.dtype, mine.tolist()) == (other.dtype, other.tolist())
            elif isinstance(mine, RoutingTrace):
                assert (mine.experts.dtype, mine.experts.tolist()) == (other.experts.dtype, other.experts.tolist())
                assert mine.covered.tolist() == other.covered.tolist()
            else:
                assert mine == other


HEADER = (
    '["d-ä","p",3,0,0.1,0.125,1234,[["d-ä/0",6,3,[[1,0,2],[2,7,1]],1.0,"stop"],'
    '["d-ä/1",6,3,[[1,0,2],[2,7,1]],0.0,"length"],["d-ä/2",6,3,[[1,0,2],[2,7,1]],1e-300,"abort"]]]'
)


def test_a_header_is_read_and_written_as_ever() -> None:
    header = header_of(group(9), 1234)
    assert header_text(header) == HEADER
    assert header_of_text(HEADER) == header


TEXT = (
    '{"prompt_id":"p-\\"1\\"","pass_index":0,"text":"1 + 1 = ä\\n","messages":[],"answer":"2",'
    '"metadata":[["source","gsm8k"]]}'
)
CHAT = (
    '{"prompt_id":"p","pass_index":2,"text":null,"messages":[["user","hi"],["system",""]],"answer":null,"metadata":[]}'
)
PROMPTS = {
    TEXT: Prompt(prompt_id='p-"1"', pass_index=0, text="1 + 1 = ä\n", answer="2", metadata=(("source", "gsm8k"),)),
    CHAT: Prompt(
        prompt_id="p", pass_index=2, messages=(Message(role="user", content="hi"), Message(role="system", content=""))
    ),
}


@pytest.mark.parametrize("text", PROMPTS)
def test_a_dispatch_is_read_and_written_as_ever(text: str) -> None:
    dispatch = Dispatch(
        dispatch_id="d-1", prompt=PROMPTS[text], group_size=8, attempt=2, policy=LATER, replica=3, created_at_s=0.1
    )
    columns = ("d-1", text, 8, 2, 2, 7, 3, 0.1)
    assert dispatch_columns(dispatch) == columns
    assert dispatch_of(columns) == dispatch
