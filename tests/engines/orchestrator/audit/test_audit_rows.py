"""What can be wrong with a row of a dump: each fault is found, named by row and column, and counted."""

from typing import Any

import pytest
from support.consistency.audit_room import (
    PROMPT,
    Audits,
    Row,
    Sequences,
    completion_rows,
    kinds,
    next_token_rows,
    token_rows,
)


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


def test_a_column_that_was_named_may_not_be_absent(audits: Audits, sequences: Sequences):
    status, document = audits.run(completion_rows(sequences), layout="completion", columns=["mask=loss_mask"])
    assert (
        status == 1
        and kinds(document)["column_missing"]["column"] == "loss_mask"
        and document["checked"]["rows_scored"] == 0
    )
