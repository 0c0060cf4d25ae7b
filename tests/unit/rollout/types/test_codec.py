"""The binary form of a group: exact round trips, refusals of anything damaged."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.builders import BASE, build_group, build_tag

from rollout.errors import StoreError
from rollout.types.codec import checksum_of, decode, encode
from rollout.types.supports import SUPPORT_LIMIT, TokenSupports, joined_supports, listed_supports, unlisted
from rollout.types.trajectory import (
    FinishReason,
    Reward,
    RoutingTrace,
    Timings,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
)
from rollout.types.weights import PolicyVersion

finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(max_size=12)
policies = st.builds(PolicyVersion, st.integers(1, 4), st.integers(0, 10**6))


@st.composite
def trajectories(draw: st.DrawFn, index: int) -> Trajectory:
    runs = draw(st.lists(st.tuples(st.integers(0, 4), policies, st.integers(1, 5)), min_size=1, max_size=4))
    size = sum(gap + length for gap, _, length in runs) + draw(st.integers(0, 3))
    rng = np.random.default_rng(index)
    sampled, logprobs = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.float32)
    spans: list[VersionSpan] = []
    position = 0
    for gap, policy, length in runs:
        start, position = position + gap, position + gap + length
        sampled[start:position] = True
        logprobs[start:position] = -rng.exponential(size=length) * 10.0 ** rng.integers(-30, 30)
        spans.append(VersionSpan(policy, start, position))
    vocab_size = draw(st.sampled_from([32, 1 << 16, 1 << 31]))
    routing = None
    if draw(st.booleans()):
        shape = (size - 1, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
        experts = rng.integers(200, size=shape)
        routing = RoutingTrace(
            experts=experts.astype(np.uint8) if draw(st.booleans()) else experts.astype(np.uint16),
            covered=rng.random(size - 1) < 0.5,
        )
    token_ids = rng.integers(vocab_size, size=size, dtype=np.int32)
    supports = None
    if draw(st.booleans()):
        counts = np.where(sampled, rng.integers(SUPPORT_LIMIT + 1, size=size), 0).astype(np.uint8)
        ids = rng.integers(vocab_size, size=int(counts.sum()), dtype=np.int32)
        ids[(np.cumsum(counts, dtype=np.int64) - 1)[counts > 0]] = token_ids[counts > 0]
        supports = TokenSupports(counts=counts, ids=ids)
    return Trajectory(
        trajectory_id=draw(text),
        dispatch_id="d",
        prompt_id="p",
        environment="e",
        token_ids=token_ids,
        sampled=sampled,
        rollout_logprobs=logprobs,
        version_spans=tuple(spans),
        turns=len(runs),
        tag=dataclasses.replace(build_tag(replica=draw(st.integers(0, 2))), lists_supports=draw(st.booleans())),
        finish_reason=draw(st.sampled_from(FinishReason)),
        timings=Timings(started_at_s=draw(finite), generation_s=draw(finite)),
        routing=routing,
        supports=supports,
    )


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    members = tuple(draw(trajectories(index)) for index in range(draw(st.integers(1, 4))))
    rewards = tuple(
        Reward(total=draw(finite), parts=tuple(draw(st.lists(st.tuples(text, finite), max_size=2)))) for _ in members
    )
    return TrajectoryGroup(
        dispatch_id="d",
        prompt_id="p",
        pass_index=draw(st.integers(0, 9)),
        environment="e",
        trajectories=members,
        rewards=rewards,
        reward_s=draw(finite),
    )


def assert_same(left: object, right: object) -> None:
    """Equal in type, value, dtype, shape and bytes, all the way down."""
    assert type(left) is type(right)
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert np.array_equal(left, right)
    elif isinstance(left, tuple) and isinstance(right, tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_same(a, b)
    elif dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    else:
        assert left == right


@settings(max_examples=60, deadline=None, derandomize=True)
@given(groups())
def test_a_group_survives_the_round_trip_exactly(group: TrajectoryGroup) -> None:
    encoded = encode(group)
    assert_same(decode(encoded.payload), group)
    assert_same(decode(encoded.payload.tobytes()), group)
    assert encoded.header.num_bytes == encoded.payload.size


def test_supports_cost_a_byte_a_sampled_token_and_two_or_four_a_kept_id() -> None:
    group = build_group(spans=((BASE, 1000),), rewards=(0.0,))
    (one,) = group.trajectories
    plain, both = encode(group).payload.size, (one.token_ids, one.sampled)
    for shift, width in ((0, 2), (1 << 16, 4)):
        kept = [[int(token), 1 + shift, 2 + shift] if here else [] for token, here in zip(*both, strict=True)]
        listed = dataclasses.replace(group, trajectories=(dataclasses.replace(one, supports=listed_supports(kept)),))
        assert 0 <= encode(listed).payload.size - plain - 1000 * (1 + 3 * width) <= 64


def test_a_support_without_its_own_token_is_no_support_of_it() -> None:
    (one, _) = build_group().trajectories
    kept = [[int(token), 30] if here else [] for token, here in zip(one.token_ids, one.sampled, strict=True)]
    assert dataclasses.replace(one, supports=listed_supports(kept)).supports is not None
    first = int(np.flatnonzero(one.sampled)[0])
    for wrong, message in (
        ({first: [int(one.token_ids[first]) + 1]}, f"token {first} is not among the tokens that its sampler kept"),
        ({0: [int(one.token_ids[0])]}, "a token that was not sampled has a support"),
    ):
        rows = [wrong.get(position, row) for position, row in enumerate(kept)]
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(one, supports=listed_supports(rows))
    with pytest.raises(ValueError, match=f"supports are of 3 tokens; expected {one.token_ids.size}"):
        dataclasses.replace(one, supports=unlisted(3))


def test_supports_are_cut_chosen_and_joined_by_token() -> None:
    rows = [[5], [], [7, 8], list(range(SUPPORT_LIMIT + 1)), [9, 1, 2]]
    whole = listed_supports(rows)
    assert whole.counts.tolist() == [1, 0, 2, 0, 3], "a support above the limit is not listed"
    assert_same(joined_supports([whole.cut(0, 2), unlisted(0), whole.cut(2, 5)]), whole)
    assert_same(whole.at(np.array([4, 1, 2])), listed_supports([rows[4], [], rows[2]]))
    assert whole.without(np.array([5, 0, 8, 3, 2], dtype=np.int32)).tolist() == []
    assert whole.without(np.array([5, 0, 9, 3, 4], dtype=np.int32)).tolist() == [2, 4]
    with pytest.raises(ValueError, match="as many int32 ids"):
        TokenSupports(counts=whole.counts, ids=whole.ids[:-1])


def test_decoded_arrays_cannot_be_written() -> None:
    for vocab_size in (32, 150_000):
        decoded = decode(encode(build_group(vocab_size=vocab_size, routing=(2, 2))).payload).trajectories[0]
        assert decoded.routing is not None
        for array in (
            decoded.token_ids,
            decoded.sampled,
            decoded.rollout_logprobs,
            decoded.routing.experts,
            decoded.routing.covered,
        ):
            assert not array.flags.writeable


def test_large_vocabulary_ids_and_routing_are_views_of_the_payload() -> None:
    payload = encode(build_group(vocab_size=1 << 20, spans=((BASE, 100),), routing=(2, 2))).payload
    decoded = decode(payload).trajectories[1]
    assert decoded.routing is not None
    assert np.shares_memory(decoded.token_ids, payload)
    assert np.shares_memory(decoded.routing.experts, payload)


def test_small_vocabularies_take_half_the_bytes_for_ids() -> None:
    sizes = [
        encode(build_group(vocab_size=vocab_size, spans=((BASE, 1000),))).payload.size
        for vocab_size in (1 << 16, 1 << 20)
    ]
    assert sizes[1] - sizes[0] >= 2 * 1000 * 2 - 32


def test_the_tag_is_stored_once_when_all_trajectories_share_it() -> None:
    group = build_group(rewards=(0.0,) * 8)
    assert encode(group).payload.tobytes().count(group.trajectories[0].tag.tokenizer_fingerprint.encode()) == 1


def test_a_trajectory_of_another_dispatch_is_refused() -> None:
    group = build_group()
    stray = dataclasses.replace(group.trajectories[0], dispatch_id="other")
    with pytest.raises(ValueError, match="put it into its own group"):
        encode(dataclasses.replace(group, trajectories=(stray, group.trajectories[1])))


def test_every_truncation_is_refused() -> None:
    payload = encode(build_group()).payload
    for size in range(payload.size):
        with pytest.raises(StoreError, match="truncated"):
            decode(payload[:size])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_every_flipped_byte_is_refused(data: st.DataObject) -> None:
    damaged = encode(build_group(routing=(1, 1))).payload.copy()
    damaged[data.draw(st.integers(0, damaged.size - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StoreError):
        decode(damaged)


@pytest.mark.parametrize(
    ("at", "value", "message"), [(0, ord("X"), "not an encoded trajectory group"), (4, 99, "format version 99")]
)
def test_foreign_magic_and_unknown_format_versions_are_named(at: int, value: int, message: str) -> None:
    damaged = encode(build_group()).payload.copy()
    damaged[at] = value
    with pytest.raises(StoreError, match=message):
        decode(damaged)


def test_the_prefix_declares_the_checksum_without_a_look_at_the_columns() -> None:
    payload = encode(build_group()).payload
    damaged = payload.copy()
    damaged[-1] ^= 1
    assert checksum_of(damaged) == checksum_of(payload)
