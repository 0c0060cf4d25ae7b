"""A small random model, sequences with its own log-probs by the library's plain forward pass, and dumps of them in
every layout."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from numpy.typing import NDArray
from pyarrow import parquet
from support.trainer.torch_models import Reference
from support.trainer.trainer_room import VOCABULARY

from orchestrator.audit.options import AuditOptions
from orchestrator.audit.run import audit_file

PROMPT = 4
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Prompts of four tokens and answers of 8 to 13."""

    ids: list[NDArray[np.int32]]
    logprobs: list[NDArray[np.float32]]
    """[answer] of the answer's tokens."""


def sample(model_dir: Path, temperature: float = 1.0, count: int = 6) -> Sequences:
    """Random tokens with the log-probs that the model gives them at a temperature."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(2, VOCABULARY, size=PROMPT + 8 + number, dtype=np.int32) for number in range(count)]
    model: Any = Reference(model_dir).model
    logprobs: list[NDArray[np.float32]] = []
    for row in ids:
        tokens = torch.from_numpy(row).long()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, PROMPT - 1 : -1] / temperature
        logprobs.append(torch.log_softmax(logits, -1).gather(1, tokens[PROMPT:, None]).squeeze(1).numpy())
    return Sequences(ids=ids, logprobs=logprobs)


def token_rows(sequences: Sequences, **more: Any) -> list[Row]:
    """Layout `tokens`."""
    return [
        {
            "token_ids": ids.tolist(),
            "mask": [0] * PROMPT + [1] * logprobs.size,
            "logprobs": [0.0] * PROMPT + logprobs.tolist(),
            **more,
        }
        for ids, logprobs in zip(sequences.ids, sequences.logprobs, strict=True)
    ]


def completion_rows(sequences: Sequences, **more: Any) -> list[Row]:
    """Layout `completion`."""
    return [
        {
            "prompt_ids": ids[:PROMPT].tolist(),
            "completion_ids": ids[PROMPT:].tolist(),
            "completion_logprobs": logprobs.tolist(),
            **more,
        }
        for ids, logprobs in zip(sequences.ids, sequences.logprobs, strict=True)
    ]


def next_token_rows(sequences: Sequences, spare: int = 0, **more: Any) -> list[Row]:
    """Layout `next_token`; `spare` entries at the end are about no token."""
    return [
        {
            "token_ids": ids.tolist(),
            "mask": [0] * (PROMPT - 1) + [1] * logprobs.size + [0] * spare,
            "logprobs": [None] * (PROMPT - 1) + logprobs.tolist() + [None] * spare,
            **more,
        }
        for ids, logprobs in zip(sequences.ids, sequences.logprobs, strict=True)
    ]


def write_dump(path: Path, rows: Sequence[Row]) -> Path:
    """JSONL or Parquet, by the suffix."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Audits:
    """Runs audits of one model on dumps in one folder."""

    def __init__(self, folder: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.model_dir, self._capsys = folder, model_dir, capsys

    def run(self, rows: Sequence[Row], suffix: str = ".jsonl", **options: Any) -> tuple[int, dict[str, Any]]:
        """Exit status and JSON document."""
        path = write_dump(self.folder / f"dump{suffix}", rows)
        given: dict[str, Any] = {"file": path, "model": self.model_dir, "as_json": True, **options}
        status = audit_file(AuditOptions(**given))
        return status, json.loads(self._capsys.readouterr().out)

    def printed(self, rows: Sequence[Row], **options: Any) -> str:
        """What people see."""
        audit_file(AuditOptions(file=write_dump(self.folder / "dump.jsonl", rows), model=self.model_dir, **options))
        return self._capsys.readouterr().out


def kinds(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Code -> finding about rows."""
    return {finding["code"]: finding for finding in document["findings"] if finding["column"] is not None}
