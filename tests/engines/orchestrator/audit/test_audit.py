"""`concord audit` on dumps of a real small model: sound ones pass in every layout and format, and each fault is found,
named by row and column, and counted."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.consistency.audit_room import (
    PROMPT,
    Audits,
    Row,
    Sequences,
    completion_rows,
    kinds,
    next_token_rows,
    sample,
    token_rows,
    write_dump,
)
from support.trainer.torch_models import Reference, manifest_of
from support.trainer.trainer_room import write_model
from typer.testing import CliRunner

from orchestrator.commands.main import app
from rollout.errors import UserError
from rollout.published.manifest import write_manifest
from rollout.published.number_formats import rounded_to_bf16
from trainer.model.routing_capture import RoutingRecorder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("audit") / "model")


@pytest.fixture(scope="module")
def sequences(model_dir: Path) -> Sequences:
    return sample(model_dir)


@pytest.fixture
def audits(tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]) -> Audits:
    return Audits(tmp_path, model_dir, capsys)


LAYOUTS: dict[str, tuple[str, Any]] = {
    "tokens": ("tokens", token_rows),
    "completion": ("completion", completion_rows),
    "next_token": ("next_token", next_token_rows),
    "next_token with a spare entry": ("next_token", lambda sequences: next_token_rows(sequences, spare=1)),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sound_dump_passes_in_every_layout_and_format(audits: Audits, sequences: Sequences, name: str, suffix: str):
    layout, rows_of = LAYOUTS[name]
    status, document = audits.run(rows_of(sequences), suffix, layout=layout)
    sampled = sum(logprobs.size for logprobs in sequences.logprobs)
    assert status == 0 and document["result"] == "pass"
    checked = document["checked"]
    assert (checked["rows"], checked["rows_scored"], checked["sampled_tokens"], checked["scored_tokens"]) == (
        6,
        6,
        sampled,
        sampled,
    )
    assert document["metrics"]["num_tokens"] == sampled and document["metrics"]["abs_difference_mean"] < 1e-5
    assert (
        set(kinds(document)) == {"version_missing"} and kinds(document)["version_missing"]["severity"] == "incomplete"
    )
    assert document["attribution"] is None


def test_columns_may_have_other_names(audits: Audits, sequences: Sequences):
    names = {"prompt_ids": "prompt", "completion_ids": "response", "completion_logprobs": "rollout_log_probs"}
    rows = [
        {names[key]: value for key, value in row.items()} | {"uid": f"u{n}"}
        for n, row in enumerate(completion_rows(sequences))
    ]
    given = ["prompt_ids=prompt", "completion_ids=response", "logprobs=rollout_log_probs", "id=uid"]
    assert audits.run(rows, layout="completion", columns=given)[0] == 0


def test_the_tokens_of_tools_stay_outside_a_completions_mask(audits: Audits, sequences: Sequences):
    rows = completion_rows(sequences)
    for row in rows:
        row["completion_mask"] = [1, 1, 0, 0] + [1] * (len(row["completion_ids"]) - 4)
        row["completion_logprobs"][2:4] = [None, None]
    status, document = audits.run(rows, layout="completion")
    assert status == 0 and document["checked"]["sampled_tokens"] == sum(row.size - 2 for row in sequences.logprobs)


def broken(row: Row, **changes: Any) -> Row:
    return {key: value for key, value in (row | changes).items() if value is not ...}


FAULTS: dict[str, tuple[str, str, str, Any]] = {
    # name -> (code, column, part of the message, what the third row gets)
    "lengths": (
        "lengths_differ",
        "logprobs",
        "got 13 entries; expected 14",
        lambda row: {"logprobs": row["logprobs"][1:]},
    ),
    "mask length": ("lengths_differ", "mask", "got 15 entries; expected 14", lambda row: {"mask": [*row["mask"], 1]}),
    "nan": (
        "logprob_not_finite",
        "logprobs",
        "1 log-probs that are NaN",
        lambda row: {"logprobs": [*row["logprobs"][:-1], float("nan")]},
    ),
    "null": (
        "logprob_not_finite",
        "logprobs",
        "1 log-probs that are NaN",
        lambda row: {"logprobs": [*row["logprobs"][:-1], None]},
    ),
    "positive": (
        "logprob_positive",
        "logprobs",
        "above 0 (up to 0.5",
        lambda row: {"logprobs": [*row["logprobs"][:-1], 0.5]},
    ),
    "vocabulary": (
        "id_outside_vocabulary",
        "token_ids",
        "first: 24); expected 0 <= id < 24",
        lambda row: {"token_ids": [24, *row["token_ids"][1:]]},
    ),
    "negative id": (
        "id_outside_vocabulary",
        "token_ids",
        "first: -1)",
        lambda row: {"token_ids": [-1, *row["token_ids"][1:]]},
    ),
    "no ids": ("column_missing", "token_ids", "found the columns logprobs, mask", lambda row: {"token_ids": ...}),
    "text": (
        "unfit_value",
        "token_ids",
        "got entries such as str 'a'",
        lambda row: {"token_ids": ["a", *row["token_ids"][1:]]},
    ),
    "fractions": ("unfit_value", "token_ids", "float 0.5", lambda row: {"token_ids": [0.5, *row["token_ids"][1:]]}),
    "nested": ("unfit_value", "logprobs", "a row is one sequence", lambda row: {"logprobs": [row["logprobs"]]}),
    "weights": ("unfit_value", "mask", "a mask, not weights", lambda row: {"mask": [0.5, *row["mask"][1:]]}),
    "empty": (
        "no_tokens",
        "token_ids",
        "at least one token",
        lambda row: {"token_ids": [], "mask": [], "logprobs": []},
    ),
    "nothing sampled": ("nothing_sampled", "mask", "no sampled token", lambda row: {"mask": [0] * len(row["mask"])}),
    "mask shifted": ("first_token_sampled", "mask", "the mask is shifted", lambda row: {"mask": [1, *row["mask"][1:]]}),
    "too long": (
        "longer_than_context",
        "token_ids",
        "context of 64",
        lambda row: {key: value * 5 for key, value in row.items()},
    ),
    "greedy": ("unfit_value", "temperature", "give --temperature 1", lambda row: {"temperature": 0.0}),
    "top_p": ("unfit_value", "top_p", "at most 1", lambda row: {"top_p": 1.5}),
    "experts": (
        "routing_of_dense_model",
        "routing",
        "the model has none",
        lambda row: {"routing": [[[0]]] * len(row["mask"])},
    ),
    "version below 0": ("sampled_without_version", "version", "no engine sampled", lambda row: {"version": -1}),
    "version name": ("unfit_value", "version", "e1-v0", lambda row: {"version": "step 3"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_unfit_row_is_named_with_its_column_and_counted_and_the_others_are_scored(
    audits: Audits, sequences: Sequences, name: str
):
    code, column, message, change = FAULTS[name]
    rows = token_rows(sequences)
    rows[2] = broken(rows[2], **change(rows[2]))
    status, document = audits.run(rows)
    assert status == 1 and document["result"] == "fail"
    assert (document["checked"]["rows"], document["checked"]["rows_scored"]) == (6, 5)
    found = kinds(document)[code]
    assert (found["severity"], found["column"], found["count"], found["rows"]) == ("fail", column, 1, [2])
    assert found["examples"][0]["place"].endswith("dump.jsonl, line 3") and message in found["examples"][0]["detail"]
    assert document["metrics"]["num_tokens"] == document["checked"]["scored_tokens"] > 0
    assert document["metrics"]["abs_difference_mean"] < 1e-5


def test_a_row_without_log_probs_makes_the_audit_incomplete_and_never_a_pass(audits: Audits, sequences: Sequences):
    rows = token_rows(sequences)
    del rows[1]["logprobs"]
    rows[4]["logprobs"] = [0.0] * len(rows[4]["logprobs"])
    status, document = audits.run(rows, ".parquet")
    assert status == 1 and document["result"] == "incomplete"
    found = kinds(document)
    assert (
        found["logprobs_missing"]["severity"],
        found["logprobs_missing"]["column"],
        found["logprobs_missing"]["rows"],
    ) == ("incomplete", "logprobs", [1])
    assert found["logprobs_missing"]["examples"][0]["place"].endswith("row 1 (from 0)")
    assert found["logprobs_all_zero"]["rows"] == [4]
    assert document["checked"]["rows_scored"] == 4


def test_a_dump_without_any_log_probs_measures_nothing(audits: Audits, sequences: Sequences):
    status, document = audits.run([broken(row, logprobs=...) for row in token_rows(sequences)])
    assert status == 1 and document["metrics"] is None and kinds(document)["logprobs_missing"]["count"] == 6
    assert "nothing_scored" in {finding["code"] for finding in document["findings"]}


def test_an_id_of_the_prompt_is_told_from_one_of_the_completion(audits: Audits, sequences: Sequences):
    rows = completion_rows(sequences)
    rows[0]["prompt_ids"][1] = 99
    rows[3]["completion_ids"][2] = 99
    found = [f for f in audits.run(rows, layout="completion")[1]["findings"] if f["code"] == "id_outside_vocabulary"]
    assert sorted((f["column"], f["rows"], f["examples"][0]["positions"]) for f in found) == [
        ("completion_ids", [3], [PROMPT + 2]),
        ("prompt_ids", [0], [1]),
    ]


def test_another_model_fails(audits: Audits, sequences: Sequences, tmp_path: Path):
    status, document = audits.run(token_rows(sequences), model=write_model(tmp_path / "other", seed=1))
    assert status == 1 and document["attribution"]["first"] == "unknown"
    assert kinds(document)["gap_mean"]["rows"] == list(range(6)) and kinds(document)["gap_mean"]["column"] == "logprobs"


@pytest.mark.parametrize("by", ["column", "option"])
def test_raw_log_probs_of_a_warm_sampler_are_found_as_semantics(audits: Audits, sequences: Sequences, by: str):
    rows = token_rows(sequences, temperature=0.8) if by == "column" else token_rows(sequences)
    status, document = audits.run(rows, temperature=None if by == "column" else 0.8)
    assert (
        status == 1
        and document["attribution"]["first"] == "logprob_semantics"
        and document["attribution"]["explained"] > 0.99
    )
    assert (
        document["checked"]["rows_assumed"] == {"temperature": 0, "top_p": 6, "top_k": 6}
        if by == "column"
        else {"temperature": 6, "top_p": 6, "top_k": 6}
    )


def test_log_probs_at_the_samplers_temperature_pass_and_an_option_outranks_the_column(
    audits: Audits, model_dir: Path, sequences: Sequences
):
    assert audits.run(token_rows(sample(model_dir, temperature=0.8), temperature=0.8))[0] == 0
    assert audits.run(token_rows(sequences, temperature=0.8), temperature=1.0)[0] == 0


def test_log_probs_in_bfloat16_are_found_as_precision(audits: Audits, sequences: Sequences):
    rounded = replace(sequences, logprobs=[rounded_to_bf16(row) for row in sequences.logprobs])
    status, document = audits.run(token_rows(rounded))
    assert (
        status == 1 and document["attribution"]["first"] == "precision" and document["attribution"]["explained"] > 0.99
    )
    assert audits.run(token_rows(rounded), engine_dtype="bfloat16")[0] == 0


def test_log_probs_that_stand_one_place_early_or_late_fail_with_the_layout_that_fits(
    audits: Audits, sequences: Sequences
):
    for shift, told in (
        (-1, "one place early: entry t is about token t + 1, as in layout next_token"),
        (1, "one place late"),
    ):
        rows = token_rows(sequences)
        for row in rows:
            row["logprobs"] = np.roll(row["logprobs"], shift).tolist()
        status, document = audits.run(rows)
        found = next(finding for finding in document["findings"] if finding["code"] == "logprobs_shifted")
        assert status == 1 and found["severity"] == "fail" and told in found["examples"][0]["detail"]
        assert document["attribution"]["first"] == "tokenizer"


def test_a_mask_along_the_tokens_does_not_pass_for_one_along_predictions(audits: Audits, sequences: Sequences):
    rows = next_token_rows(sequences, spare=1)
    for row in rows:
        row["mask"] = [0, *row["mask"][:-1]]
    status, document = audits.run(rows, layout="next_token")
    assert (
        status == 1
        and kinds(document)["last_entry_sampled"]["count"] == 6
        and kinds(document)["last_entry_sampled"]["column"] == "mask"
    )


def test_versions_along_the_tokens_do_not_fit_a_mask_along_predictions(audits: Audits, sequences: Sequences):
    """Public fault 3: the two are aligned apart, and every age is off by one at the seams."""
    rows = next_token_rows(sequences, spare=1)
    for row, logprobs in zip(rows, sequences.logprobs, strict=True):
        row["version"] = [-1] * (PROMPT - 1) + [0] * logprobs.size + [-1]
    assert audits.run(rows, layout="next_token")[0] == 0
    for row in rows:
        row["version"] = [-1, *row["version"][:-1]]
    status, document = audits.run(rows, layout="next_token")
    found = kinds(document)["sampled_without_version"]
    assert (
        status == 1
        and found["rows"] == list(range(6))
        and found["column"] == "version"
        and found["examples"][0]["positions"] == [PROMPT]
    )


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


def test_a_limit_is_reported(audits: Audits, sequences: Sequences):
    _, document = audits.run(token_rows(sequences), limit=4)
    assert document["more_rows"] and document["checked"]["rows"] == 4
    assert not audits.run(token_rows(sequences), limit=6)[1]["more_rows"]


def test_people_read_what_was_checked_what_failed_and_why(audits: Audits, sequences: Sequences):
    text = audits.printed(token_rows(sequences, temperature=0.8))
    told = (
        ": FAIL",
        "6 rows, 6 of them scored",
        "mean |d|",
        "gap_mean: column 'logprobs', 6 rows (0, 1, 2, 3, 4, ...)",
        "logprob_semantics: ",
        "top_p of 6",
    )
    assert not [part for part in told if part not in text]
    assert ": PASS" in audits.printed(token_rows(sequences))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["logprob=x"]}, "layout tokens reads the keys ids, mask, logprobs"),
        ({"columns": ["completion_ids=x"]}, "layout tokens reads the keys"),
        ({"columns": ["logprobs"]}, "expected KEY=COLUMN"),
        ({"temperature": 0.0}, "--temperature: got float 0.0; expected a temperature above 0"),
        ({"top_k": -2}, "--top-k: got int -2; expected a whole number, 0 or -1"),
        ({"file": Path("nowhere.jsonl")}, "FILE = nowhere.jsonl, which does not exist"),
        ({"model": Path("nowhere")}, "model directory nowhere does not exist"),
        ({"weights": Path("nowhere")}, "--weights nowhere, which does not exist"),
    ],
)
def test_what_cannot_be_used_at_all_is_the_users_to_mend(
    audits: Audits, sequences: Sequences, options: dict[str, Any], message: str
):
    with pytest.raises(UserError) as caught:
        audits.run(token_rows(sequences), **options)
    assert message in str(caught.value)


def test_a_column_that_was_named_may_not_be_absent(audits: Audits, sequences: Sequences):
    status, document = audits.run(completion_rows(sequences), layout="completion", columns=["mask=loss_mask"])
    assert (
        status == 1
        and kinds(document)["column_missing"]["column"] == "loss_mask"
        and document["checked"]["rows_scored"] == 0
    )


def test_the_command_line_takes_the_options_and_answers_with_its_exit_status(
    tmp_path: Path, model_dir: Path, sequences: Sequences
):
    path = write_dump(tmp_path / "dump.jsonl", [{**row, "lp": row["logprobs"]} for row in token_rows(sequences)])
    arguments = [
        "audit",
        str(path),
        "--model",
        str(model_dir),
        "--columns",
        "logprobs=lp",
        "--layout",
        "tokens",
        "--limit",
        "3",
        "--json",
    ]
    passed = CliRunner().invoke(app, arguments)
    assert passed.exit_code == 0 and json.loads(passed.stdout)["checked"]["rows"] == 3
    assert CliRunner().invoke(app, [*arguments, "--temperature", "0.5"]).exit_code == 1
    assert CliRunner().invoke(app, [*arguments, "--layout", "other"]).exit_code == 2
    unread_file = [str(Path(sys.executable).with_name("concord")), "audit", "nowhere.jsonl", "--model", str(model_dir)]
    unread = subprocess.run(unread_file, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert unread.returncode == 2 and "nowhere.jsonl, which does not exist" in unread.stderr
