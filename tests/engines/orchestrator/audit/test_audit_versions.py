"""Dumps that say which version sampled a token, and which experts were chosen."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.consistency.audit_room import PROMPT, Audits, Row, kinds, sample, token_rows
from support.trainer.torch_models import Reference, manifest_of
from support.trainer.trainer_room import write_model

from rollout.published.manifest import write_manifest
from trainer.model.routing_capture import RoutingRecorder


@pytest.fixture(scope="module")
def weights(model_dir: Path) -> Path:
    """Version 1 of a run, which is another model."""
    folder = model_dir.parent / "weights"
    write_model(folder / "e1-v1", seed=7)
    write_manifest(folder / "e1-v1", manifest_of(folder / "e1-v1", 1))
    return folder


def mixed_rows(model_dir: Path, weights: Path) -> list[Row]:
    """The first six answer tokens of each row by version 0, the others by version 1."""
    old, new = sample(model_dir), sample(weights / "e1-v1")
    mixed = replace(
        old, logprobs=[np.concatenate([a[:6], b[6:]]) for a, b in zip(old.logprobs, new.logprobs, strict=True)]
    )
    rows = token_rows(mixed)
    for row in rows:
        row["version"] = [None] * PROMPT + [0] * 6 + [1] * (len(row["mask"]) - PROMPT - 6)
    return rows


def test_each_token_is_scored_at_its_version(audits: Audits, model_dir: Path, weights: Path):
    status, document = audits.run(mixed_rows(model_dir, weights), weights=weights)
    assert status == 0 and not document["findings"] and document["checked"]["rows_with_versions"] == 6


def test_several_versions_without_their_weights_say_that_the_gap_holds_staleness(
    audits: Audits, model_dir: Path, weights: Path
):
    status, document = audits.run(mixed_rows(model_dir, weights))
    assert status == 1 and "one_model_for_several_versions" in {finding["code"] for finding in document["findings"]}


def test_a_version_that_was_not_published_fails_and_its_tokens_are_not_scored(
    audits: Audits, model_dir: Path, weights: Path
):
    rows = mixed_rows(model_dir, weights)
    rows[5]["version"] = [None if v is None else v * 8 for v in rows[5]["version"]]
    status, document = audits.run(rows, weights=weights)
    found = kinds(document)
    assert status == 1 and found["unknown_version"]["rows"] == [5] and found["unknown_version"]["column"] == "version"
    assert found["tokens_not_scored"]["rows"] == [5] and "e1-v8" in found["tokens_not_scored"]["examples"][0]["detail"]
    assert document["checked"]["scored_tokens"] == document["checked"]["sampled_tokens"] - (13 - 6)


def test_routing_is_compared_and_missing_rows_are_missing(audits: Audits, tmp_path: Path):
    moe = write_model(tmp_path / "moe", moe=True)
    sequences, model = sample(moe), Reference(moe).model
    recorder, rows = RoutingRecorder(model, 12, 2), token_rows(sequences)
    for row in rows:
        with recorder.recording(), torch.no_grad():
            model(torch.tensor([row["token_ids"]]))
        row["routing"] = recorder.take().experts.tolist()
    status, document = audits.run(rows, model=moe)
    assert status == 0 and document["routing"]["mismatch"] == 0 and document["routing"]["coverage"] == 1
    rows[0]["routing"][PROMPT] = None
    rows[1]["routing"][-2] = [[-1, -1], [-1, -1]]
    del rows[2]["routing"]
    rows[3]["routing"] = [[[(e + 1) % 12 for e in block] for block in row] for row in rows[3]["routing"]]
    rows[4]["routing"] = [row[:1] for row in rows[4]["routing"]]
    status, document = audits.run(rows, model=moe)
    found = kinds(document)
    assert status == 1 and found["routing_incomplete"]["rows"] == [0, 1] and found["routing_missing"]["rows"] == [2]
    assert found["routing_incomplete"]["severity"] == found["routing_missing"]["severity"] == "incomplete"
    assert found["routing_shape"]["rows"] == [4] and "2 blocks" in found["routing_shape"]["examples"][0]["detail"]
    assert 0 < document["routing"]["mismatch"] < 1 and document["routing"]["coverage"] < 1
