"""The rows that a run of Weights & Biases has written, read from its file: a log of records in blocks, as LevelDB keeps
one, with a header of its own."""

import json
import struct
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

records: Any = wandb_internal_pb2
HEADER_BYTES, BLOCK_BYTES, RECORD_HEADER = 7, 32768, struct.Struct("<IHB")
FULL, LAST = 1, 4
"""Kinds of fragments that end a record."""


def rows_of(file: Path) -> list[dict[str, Any]]:
    """What was logged, in order."""
    rows: list[dict[str, Any]] = []
    for content in _records(file.read_bytes()):
        record = records.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                key, *inner = item.nested_key or [item.key]
                if inner:
                    row.setdefault(key, {})[inner[0]] = json.loads(item.value_json)
                else:
                    row[key] = json.loads(item.value_json)
            rows.append(row)
    return rows


def _records(content: bytes) -> list[bytes]:
    found, whole, place = list[bytes](), b"", HEADER_BYTES
    while place + RECORD_HEADER.size <= len(content):
        if BLOCK_BYTES - place % BLOCK_BYTES < RECORD_HEADER.size:  # no header fits into what is left of the block
            place += BLOCK_BYTES - place % BLOCK_BYTES
            continue
        _, length, kind = RECORD_HEADER.unpack_from(content, place)
        place += RECORD_HEADER.size
        whole += content[place : place + length]
        place += length
        if kind in (FULL, LAST):
            found.append(whole)
            whole = b""
    return found
