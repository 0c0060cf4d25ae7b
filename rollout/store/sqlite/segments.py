"""Encoded groups on disk: append-only files `tokens/segment-N.bin`. It knows bytes and places; which place belongs to
what is in the tables.

A payload is written (and, for `machine` durability, synced) before the transaction that names its place commits, so a
named place always holds its bytes; what a crash leaves behind without a name is never read. Every opening starts a new
segment, so two processes never share one. Nothing is deleted while the run directory lives: `concord explain`, audits
and quarantine read trajectories long after training.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.errors import StoreError
from rollout.store.sqlite.schema import Durability, store_errors
from rollout.types.codec import checksum_of

DIRECTORY = "tokens"
SEGMENT_BYTES = 256 * 1024 * 1024
"""A segment that has reached this is closed; the next batch starts another."""
_ALIGNMENT = 64
_BUFFERS_A_WRITE = 512
"""Below every platform's limit of buffers in one gathering write."""
_OPEN_FILES = 16


class SegmentPlace(NamedTuple):
    """Where the bytes of one group are."""

    segment: int
    offset: int
    num_bytes: int
    checksum: int
    """What the payload's own prefix declares, so that a place that points at another group's bytes is found out."""


def segment_path(directory: Path, segment: int) -> Path:
    """The file of a segment."""
    return directory / f"segment-{segment:06d}.bin"


class SegmentWriter:
    """Appends batches of payloads. A batch is taken back unless its transaction committed (`keep`)."""

    def __init__(self, directory: Path, durability: Durability, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._directory = directory
        self._sync = durability == "machine"
        self._segment_bytes = segment_bytes
        self._file = -1
        self._segment = max((int(path.stem.partition("-")[2]) for path in directory.glob("segment-*.bin")), default=0)
        self._end = 0
        self._kept = 0

    def append(self, payloads: Sequence[NDArray[np.uint8]]) -> list[SegmentPlace]:
        """Write `payloads` behind each other, each on a 64-byte boundary, and answer with their places.

        Raises:
            OSError: the disk refused.
        """
        if self._file < 0 or self._end >= self._segment_bytes:
            self._open_next()
        places: list[SegmentPlace] = []
        buffers: list[memoryview] = []
        for payload in payloads:
            places.append(SegmentPlace(self._segment, self._end, payload.size, checksum_of(payload)))
            padding = -payload.size % _ALIGNMENT
            buffers += [np.ascontiguousarray(payload).data, memoryview(bytes(padding))]
            self._end += payload.size + padding
        write_all(self._file, buffers)
        if self._sync:
            os.fdatasync(self._file)
        return places

    def keep(self) -> None:
        """What was appended has committed."""
        self._kept = self._end

    def take_back(self) -> None:
        """Forget what was appended and did not commit; nothing, if all of it did."""
        if self._end == self._kept:
            return
        try:
            os.ftruncate(self._file, self._kept)
            self._end = self._kept
        except OSError:
            # The tail stays without a name, which is harmless; a new segment starts on known ground.
            self.close()

    def close(self) -> None:
        """Close the current segment; a later `append` starts another."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._end, self._kept = -1, 0, 0

    def _open_next(self) -> None:
        self.close()
        self._directory.mkdir(exist_ok=True)
        self._segment += 1
        self._file = os.open(
            segment_path(self._directory, self._segment),
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC,
            0o644,
        )
        if self._sync:
            _sync_directory(self._directory)
            _sync_directory(self._directory.parent)


class SegmentReader:
    """Reads payloads by place; keeps a few segments open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: OrderedDict[int, int] = OrderedDict()

    def read(self, place: SegmentPlace) -> NDArray[np.uint8]:
        """The payload at `place`, read-only.

        Raises:
            StoreError: the segment is missing or shorter than the place, or holds other bytes there.
        """
        with store_errors(f"reading segment {place.segment}"):
            found = os.pread(self._open(place.segment), place.num_bytes, place.offset)
        if len(found) != place.num_bytes:
            path, missing = segment_path(self._directory, place.segment), place.num_bytes - len(found)
            raise StoreError(
                f"{path} ends {missing} bytes before the group at byte {place.offset} does: the segment was cut; "
                "restore it from a copy"
            )
        payload = np.frombuffer(found, dtype=np.uint8)
        if checksum_of(payload) != place.checksum:
            path = segment_path(self._directory, place.segment)
            raise StoreError(
                f"{path} holds another group at byte {place.offset} than the store names: the segment was overwritten; "
                "restore it from a copy"
            )
        return payload

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _open(self, segment: int) -> int:
        if segment not in self._files:
            self._files[segment] = os.open(segment_path(self._directory, segment), os.O_RDONLY | os.O_CLOEXEC)
        self._files.move_to_end(segment)
        if len(self._files) > _OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        return self._files[segment]


def write_all(file: int, buffers: list[memoryview]) -> None:
    """Gathering writes until every byte is out; the system may take fewer than it is given."""
    at = 0
    while at < len(buffers):
        written = os.writev(file, buffers[at : at + _BUFFERS_A_WRITE])
        while at < len(buffers) and written >= len(buffers[at]):
            written -= len(buffers[at])
            at += 1
        if written:
            buffers[at] = buffers[at][written:]


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
