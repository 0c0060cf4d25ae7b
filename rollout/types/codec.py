"""The binary form of a trajectory group: one contiguous buffer from the episode worker to the trainer, and on disk.

Layout: a 24-byte prefix (magic, format version, length of the header, CRC-32, total bytes), a JSON header with
everything that is not an array, then the columns of all trajectories, each column on a 16-byte boundary: token ids
(uint16 if all fit, else int32), the float32 log-probs of the sampled positions only, and of each trajectory its routing
trace and its supports (uint8 counts of the sampled positions, and the kept ids). Where a token was sampled follows from
the version spans, which cover exactly those positions. A trajectory without supports is written as it was before there
were any, and what was written then is still read. This module knows nothing of the store, of files, or of who sends the
buffer.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import StoreError, boundary
from rollout.types.supports import TokenSupports
from rollout.types.trajectory import (
    EncodedGroup,
    EngineTag,
    FinishReason,
    LogprobSemantics,
    Reward,
    RoutingTrace,
    Timings,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
    header_of,
)
from rollout.types.weights import PolicyVersion
from rollout.types.wire import rebuilt

MAGIC = b"CCRD"
FORMAT_VERSION = 1
_PREFIX = struct.Struct("<4sIIIQ")
_ALIGNMENT = 16
_TAG_FIELDS = tuple(field.name for field in fields(EngineTag))
_OLD_TAG_FIELDS = _TAG_FIELDS[:-1]
"""Before engines listed supports."""
_TRAJECTORY_FIELDS = tuple(field.name for field in fields(Trajectory))
_FINISH_REASONS = {str(reason): reason for reason in FinishReason}
_tag_values, _old_tag_values = attrgetter(*_TAG_FIELDS), attrgetter(*_OLD_TAG_FIELDS)
_group_names = attrgetter("dispatch_id", "prompt_id", "environment")
compact_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
"""JSON without spaces, keys in the order given."""


def encode(group: TrajectoryGroup) -> EncodedGroup:
    """The binary form of `group`, with its header for scheduling. Lossless; the payload is read-only.

    Raises:
        ValueError: a trajectory names another dispatch, prompt or environment than its group.
    """
    tags: list[EngineTag] = []
    rows = [
        _row(group, trajectory, reward, tags)
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True)
    ]
    ids = np.concatenate([trajectory.token_ids for trajectory in group.trajectories])
    # Seen as unsigned, a negative id is large: one maximum checks both ends.
    narrow = bool(ids.view(np.uint32).max() < 1 << 16)
    header = compact_json(
        {
            "dispatch_id": group.dispatch_id,
            "prompt_id": group.prompt_id,
            "pass_index": group.pass_index,
            "environment": group.environment,
            "reward_s": group.reward_s,
            "narrow_ids": narrow,
            "tags": [_tag_values(tag) if tag.lists_supports else _old_tag_values(tag) for tag in tags],
            "trajectories": rows,
        }
    ).encode()
    columns = [ids.astype(np.uint16) if narrow else ids, *_logprob_columns(group), *_columns_by_trajectory(group)]
    payload = _assemble(header, columns)
    return EncodedGroup(header=header_of(group, payload.size), payload=payload)


def decode(payload: NDArray[np.uint8] | bytes) -> TrajectoryGroup:
    """The group that `payload` encodes. Arrays are read-only: views of the payload for int32 ids and routing, one
    allocation a group for the rest.

    Raises:
        StoreError: not a payload, another format version, truncated, or damaged.
    """
    buffer = np.frombuffer(payload, dtype=np.uint8) if isinstance(payload, bytes) else payload.view()
    buffer.flags.writeable = False
    header_bytes = _checked_header_bytes(buffer)
    with boundary(StoreError, "the payload's checksum is right but its content is not a trajectory group"):
        header: dict[str, Any] = json.loads(buffer[_PREFIX.size : _PREFIX.size + header_bytes].tobytes())
        return TrajectoryGroup(
            dispatch_id=header["dispatch_id"],
            prompt_id=header["prompt_id"],
            pass_index=header["pass_index"],
            environment=header["environment"],
            trajectories=tuple(_trajectories(buffer, _aligned(_PREFIX.size + header_bytes), header)),
            rewards=tuple(
                Reward(total=row[8], parts=tuple((name, value) for name, value in row[9]))
                for row in header["trajectories"]
            ),
            reward_s=header["reward_s"],
        )


def checksum_of(payload: NDArray[np.uint8]) -> int:
    """The CRC-32 that the prefix of `payload` declares (not recomputed).

    Raises:
        StoreError: not a payload of this format version, or its length is not what it declares.
    """
    return _checked_prefix(payload)[1]


def _row(group: TrajectoryGroup, trajectory: Trajectory, reward: Reward, tags: list[EngineTag]) -> list[object]:
    """Everything of one trajectory that is not an array. Its order is part of the format."""
    mine, theirs = _group_names(trajectory), _group_names(group)
    if mine != theirs:
        found, expected = ("dispatch {}, prompt {}, environment {}".format(*names) for names in (mine, theirs))
        raise ValueError(
            f"trajectory {trajectory.trajectory_id} is of {found}; its group is of {expected}: put it into its own "
            "group"
        )
    # Engines hand out one tag object for many samples: identity is tried before the slower equality.
    index = next((i for i, tag in enumerate(tags) if tag is trajectory.tag or tag == trajectory.tag), len(tags))
    if index == len(tags):
        tags.append(trajectory.tag)
    timings, routing, supports = trajectory.timings, trajectory.routing, trajectory.supports
    return [
        trajectory.trajectory_id,
        trajectory.token_ids.size,
        trajectory.turns,
        index,
        trajectory.finish_reason,
        timings.started_at_s,
        timings.generation_s,
        [
            number
            for span in trajectory.version_spans
            for number in (span.policy.trainer_epoch, span.policy.version, span.start, span.end)
        ],
        float(reward.total),
        [(name, float(value)) for name, value in reward.parts],
        None if routing is None else [routing.experts.dtype.name, *routing.experts.shape[1:]],
        *(() if supports is None else (np.dtype(_id_type(supports.ids)).name,)),
    ]


def _logprob_columns(group: TrajectoryGroup) -> list[NDArray[Any]]:
    sampled = [t.rollout_logprobs[span.start : span.end] for t in group.trajectories for span in t.version_spans]
    return [np.concatenate(sampled)]


def _columns_by_trajectory(group: TrajectoryGroup) -> list[NDArray[Any]]:
    columns: list[NDArray[Any]] = []
    for trajectory in group.trajectories:
        if trajectory.routing is not None:
            columns += [
                np.ascontiguousarray(trajectory.routing.experts),
                np.ascontiguousarray(trajectory.routing.covered),
            ]
        if trajectory.supports is not None:
            columns += [
                trajectory.supports.counts[trajectory.sampled],
                np.ascontiguousarray(trajectory.supports.ids.astype(_id_type(trajectory.supports.ids))),
            ]
    return columns


def _assemble(header: bytes, columns: list[NDArray[Any]]) -> NDArray[np.uint8]:
    """Prefix, header and aligned columns in one read-only buffer."""
    offsets: list[int] = []
    end = _PREFIX.size + len(header)
    for column in columns:
        offsets.append(_aligned(end))
        end = offsets[-1] + column.nbytes
    payload = np.zeros(end, dtype=np.uint8)
    payload[_PREFIX.size : _PREFIX.size + len(header)] = np.frombuffer(header, dtype=np.uint8)
    for offset, column in zip(offsets, columns, strict=True):
        payload[offset : offset + column.nbytes] = column.reshape(-1).view(np.uint8)
    _PREFIX.pack_into(
        payload.data, 0, MAGIC, FORMAT_VERSION, len(header), zlib.crc32(payload.data[_PREFIX.size :]), end
    )
    payload.flags.writeable = False
    return payload


def _checked_prefix(payload: NDArray[np.uint8]) -> tuple[int, int]:
    """(bytes of the header, declared checksum)."""
    if payload.dtype != np.uint8 or payload.ndim != 1 or payload.size < _PREFIX.size:
        raise StoreError(
            f"got {payload.dtype} {payload.shape} as a payload; expected a uint8 vector of at least {_PREFIX.size} "
            "bytes: it is truncated or something else"
        )
    magic, version, header_bytes, checksum, total = _PREFIX.unpack_from(payload.data)
    if magic != MAGIC:
        raise StoreError(f"payload starts with {magic!r}; expected {MAGIC!r}: this is not an encoded trajectory group")
    if version != FORMAT_VERSION:
        raise StoreError(
            f"payload has format version {version}; this version of Concord reads {FORMAT_VERSION}: open the run with "
            "the version that wrote it"
        )
    if total != payload.size or header_bytes > total - _PREFIX.size:
        raise StoreError(
            f"payload has {payload.size} bytes; its prefix declares {total}, of which {header_bytes} are the header: it"
            " is truncated or damaged"
        )
    return header_bytes, checksum


def _checked_header_bytes(payload: NDArray[np.uint8]) -> int:
    header_bytes, declared = _checked_prefix(payload)
    found = zlib.crc32(payload.data[_PREFIX.size :])
    if found != declared:
        raise StoreError(
            f"payload has checksum {found:#010x}; its prefix declares {declared:#010x}: the bytes were damaged after "
            "they were written"
        )
    return header_bytes


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _columns(
    buffer: NDArray[np.uint8], offset: int, rows: list[list[Any]], narrow: bool
) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32], int]:
    """Ids, sampled and log-probs [sum of T] of all trajectories, one behind the other and read-only, and the offset
    behind them, where routing traces and supports start."""
    num_tokens = sum([row[1] for row in rows])
    ids_end = offset + num_tokens * (2 if narrow else 4)
    ids = buffer[offset:ids_end].view(np.uint16).astype(np.int32) if narrow else buffer[offset:ids_end].view(np.int32)
    packed_from = _aligned(ids_end)
    packed = buffer[packed_from : packed_from + (buffer.size - packed_from) // 4 * 4].view(np.float32)
    sampled = np.zeros(num_tokens, dtype=np.bool_)
    logprobs = np.zeros(num_tokens, dtype=np.float32)
    first = taken = 0
    for row in rows:
        spans = row[7]
        for start, end in zip(spans[2::4], spans[3::4], strict=True):
            upto = taken + end - start
            logprobs[first + start : first + end] = packed[taken:upto]
            sampled[first + start : first + end] = True
            taken = upto
        first += row[1]
    for column in (ids, sampled, logprobs):
        column.flags.writeable = False
    return ids, sampled, logprobs, packed_from + taken * 4


def _trajectories(buffer: NDArray[np.uint8], offset: int, header: dict[str, Any]) -> Iterator[Trajectory]:
    """Made without the checks of construction, half the cost of decoding: `encode` took checked ones, and
    the checksum says that these are their bytes."""
    rows: list[list[Any]] = header["trajectories"]
    ids, sampled, logprobs, traces_from = _columns(buffer, offset, rows, header["narrow_ids"])
    tags: list[EngineTag] = [_tag(*values) for values in header["tags"]]
    names = (header["dispatch_id"], header["prompt_id"], header["environment"])
    first = 0
    tag: int
    for identity, size, turns, tag, finish, started_at_s, generation_s, spans, _, _, shape, *more in rows:
        here, first = slice(first, first + size), first + size
        routing: RoutingTrace | None = None
        if shape is not None:
            routing, traces_from = _routing(buffer, traces_from, size - 1, shape)
        supports: TokenSupports | None = None
        if more:
            supports, traces_from = _supports(buffer, traces_from, sampled[here], more[0])
        arrays = (ids[here], sampled[here], logprobs[here])
        timings = Timings(started_at_s=started_at_s, generation_s=generation_s)
        ending = (tags[tag], _FINISH_REASONS[finish], timings, routing, supports)
        yield rebuilt(Trajectory, _TRAJECTORY_FIELDS, (identity, *names, *arrays, _spans(spans), turns, *ending))


def _spans(flat: list[int]) -> tuple[VersionSpan, ...]:
    numbers = iter(flat)
    return tuple(
        [
            VersionSpan(_policy(epoch, version), start, end)
            for epoch, version, start, end in zip(numbers, numbers, numbers, numbers, strict=True)
        ]
    )


def _routing(buffer: NDArray[np.uint8], offset: int, rows: int, shape: list[Any]) -> tuple[RoutingTrace, int]:
    """The trace that starts behind `offset`, and the offset behind it; shape is (dtype, blocks, top_k)."""
    dtype, blocks, top_k = np.dtype(shape[0]), shape[1], shape[2]
    start = _aligned(offset)
    end = start + rows * blocks * top_k * dtype.itemsize
    covered_from = _aligned(end)
    experts = buffer[start:end].view(dtype).reshape(rows, blocks, top_k)
    return (
        RoutingTrace(experts=experts, covered=buffer[covered_from : covered_from + rows].view(np.bool_)),
        covered_from + rows,
    )


def _supports(
    buffer: NDArray[np.uint8], offset: int, sampled: NDArray[np.bool_], id_type: str
) -> tuple[TokenSupports, int]:
    """The supports that start behind `offset`, and the offset behind them."""
    start = _aligned(offset)
    counts = np.zeros(sampled.size, dtype=np.uint8)
    packed = buffer[start : start + int(np.count_nonzero(sampled))]
    counts[sampled] = packed
    ids_from, dtype = _aligned(start + packed.size), np.dtype(id_type)
    end = ids_from + int(counts.sum(dtype=np.int64)) * dtype.itemsize
    ids = buffer[ids_from:end].view(dtype).astype(np.int32, copy=False)
    counts.flags.writeable = ids.flags.writeable = False
    return TokenSupports(counts=counts, ids=ids), end


def _id_type(ids: NDArray[np.int32]) -> type[np.uint16] | type[np.int32]:
    """The narrowest type that holds these ids."""
    return np.uint16 if not ids.size or int(ids.view(np.uint32).max()) < 1 << 16 else np.int32


_policy = lru_cache(maxsize=256)(PolicyVersion)


@lru_cache(maxsize=256)
def _tag(*values: object) -> EngineTag:
    names = _TAG_FIELDS if len(values) == len(_TAG_FIELDS) else _OLD_TAG_FIELDS
    by_name: dict[str, Any] = dict(zip(names, values, strict=True))
    by_name["logprob_semantics"] = LogprobSemantics(by_name["logprob_semantics"])
    return EngineTag(**by_name)
