"""`concord audit` on dumps of a real small model: sound ones pass in every layout and format, other numerics are
explained, and what the user asks for is what is shown."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.consistency.audit_room import (
    Audits,
    Sequences,
    completion_rows,
    kinds,
    next_token_rows,
    sample,
    token_rows,
    write_dump,
)
from support.trainer.trainer_room import write_model
from typer.testing import CliRunner

from orchestrator.commands.main import app
from rollout.errors import UserError
from rollout.published.number_formats import rounded_to_bf16

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
