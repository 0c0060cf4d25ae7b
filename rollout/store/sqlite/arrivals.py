"""Finished groups on their way in and out: which are taken, where their bytes lie, and the headers that stay in the
tables."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.errors import StoreError
from rollout.store.sqlite.database import DispatchRow, Transaction
from rollout.store.sqlite.journal import EventKind
from rollout.store.sqlite.records import header_of_text, header_text
from rollout.store.sqlite.segments import SegmentPlace, SegmentReader, SegmentWriter
from rollout.types.dispatch import DispatchState
from rollout.types.trajectory import EncodedGroup, GroupHeader


def put(work: Transaction, groups: Sequence[EncodedGroup], segments: SegmentWriter, epoch: int) -> tuple[str, ...]:
    """dispatched -> ready. The bytes are on disk before the transaction that names them can commit."""
    taken: dict[str, EncodedGroup] = {}
    accepted: list[DispatchRow] = []
    for group, row in zip(groups, work.require([group.header.dispatch_id for group in groups], "put"), strict=True):
        _check(group, row, epoch)
        if row.state is not DispatchState.DISPATCHED or row.dispatch_id in taken:
            work.event_of([row.dispatch_id], EventKind.PUT_REFUSED, state=row.state, reason=row.reason)
        else:
            taken[row.dispatch_id] = group
            accepted.append(row)
    if taken:
        places = segments.append([group.payload for group in taken.values()])
        work.connection.executemany(
            "INSERT INTO groups(sequence, header, segment, offset, num_bytes, checksum) VALUES (?, ?, ?, ?, ?, ?)",
            [
                (row.sequence, header_text(taken[row.dispatch_id].header), *place)
                for row, place in zip(accepted, places, strict=True)
            ],
        )
        work.move(accepted, DispatchState.READY)
    for group in taken.values():
        header = group.header
        tokens = sum(t.num_tokens for t in header.trajectories)
        sizes = {"trajectories": len(header.trajectories), "tokens": tokens, "bytes": header.num_bytes}
        work.event_of([header.dispatch_id], EventKind.READY, **sizes, replica=header.replica)
    return tuple(taken)


def _check(group: EncodedGroup, row: DispatchRow, epoch: int) -> None:
    header = group.header
    if (header.prompt_id, header.pass_index) != (row.prompt_id, row.pass_index):
        found, expected = f"{header.prompt_id} in pass {header.pass_index}", f"{row.prompt_id} in pass {row.pass_index}"
        raise StoreError(
            f"put: group {header.dispatch_id} is of prompt {found}, its dispatch of {expected}; nothing was put"
        )
    if group.payload.size != header.num_bytes:
        sizes = f"{group.payload.size} bytes, its header says {header.num_bytes}"
        raise StoreError(f"put: group {header.dispatch_id} has {sizes}; encode it again; nothing was put")
    unknown = {
        policy.key
        for trajectory in header.trajectories
        for policy, _ in trajectory.tokens_by_policy
        if policy.trainer_epoch > epoch
    }
    if unknown:
        tokens = f"tokens of {', '.join(sorted(unknown))}, but the newest epoch is {epoch}"
        raise StoreError(
            f"put: group {header.dispatch_id} holds {tokens}: no such policy can have sampled them; nothing was put"
        )


def payloads(work: Transaction, rows: Sequence[DispatchRow], segments: SegmentReader) -> tuple[NDArray[np.uint8], ...]:
    """The encoded groups of `rows`, in their order."""
    places = work.by_sequence(rows, "SELECT sequence, segment, offset, num_bytes, checksum FROM groups")
    return tuple(segments.read(SegmentPlace(*places[row.sequence])) for row in rows)


def headers(work: Transaction, rows: Sequence[DispatchRow]) -> list[GroupHeader]:
    """The headers of the groups of `rows`, in order of dispatch, without a look at their bytes."""
    texts = work.by_sequence(rows, "SELECT sequence, header FROM groups", "ORDER BY sequence")
    return [header_of_text(text) for (text,) in texts.values()]
