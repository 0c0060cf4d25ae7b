"""What can be wrong with a trajectory before any model is asked, and in which way two readings of one text differ."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.builders import build_trajectory

from trainer.consistency.checks.structure import (
    Columns,
    DriftKind,
    check_same_ids,
    check_structure,
    check_trajectory,
    classify_drift,
    doubled_bos,
)
from trainer.types.evidence import Check, CheckFinding, CheckSeverity

VOCAB = 32
END, START, TOOL, NEWLINE = 1, 2, 3, 30
SPECIAL = {END, START, TOOL}


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def mask(text: str) -> NDArray[np.bool_]:
    """`x`: the policy's."""
    return np.array([letter == "x" for letter in text], dtype=np.bool_)


def columns(**changes: Any) -> Columns:
    """Two given and three sampled tokens, all well."""
    sound = Columns(
        token_ids=ids(4, 5, 6, 7, 8),
        sampled=mask("--xxx"),
        logprobs=np.array([0, 0, -0.5, -1.0, -0.1], dtype=np.float32),
        spans=((2, 4), (4, 5)),
    )
    return replace(sound, **changes)


def codes(findings: Sequence[CheckFinding]) -> list[str]:
    return [finding.code for finding in findings]


def only(findings: Sequence[CheckFinding]) -> CheckFinding:
    assert len(findings) == 1, findings
    return findings[0]


# --- one trajectory ---------------------------------------------------------------------------------------------------


def test_a_sound_trajectory_has_no_findings() -> None:
    assert check_structure(columns(), VOCAB, bos_id=4) == ()
    assert check_trajectory(build_trajectory(), VOCAB, bos_id=31) == ()


@pytest.mark.parametrize(
    "changed", [{"sampled": mask("--xx")}, {"logprobs": np.zeros(6, dtype=np.float32)}, {"token_ids": ids(4, 5)}]
)
def test_columns_of_unequal_length_are_refused_before_they_are_read_side_by_side(changed: dict[str, Any]) -> None:
    finding = only(check_structure(columns(**changed), VOCAB))
    assert (finding.code, finding.severity, finding.check) == ("lengths_differ", CheckSeverity.FAIL, Check.STRUCTURE)


def test_ids_outside_the_vocabulary_are_named_with_their_positions() -> None:
    finding = only(check_structure(columns(token_ids=ids(4, 32, 6, -1, 8)), VOCAB))
    assert finding.code == "id_outside_vocabulary" and finding.positions == (1, 3)
    assert "first: 32" in finding.detail and "0 <= id < 32" in finding.detail


def test_a_mask_that_takes_the_first_token_in_is_shifted() -> None:
    found = check_structure(
        columns(sampled=mask("xxxxx"), spans=((0, 5),), logprobs=np.full(5, -1.0, dtype=np.float32)), VOCAB
    )
    assert only(found).code == "first_token_sampled"


def test_nothing_sampled_is_a_finding() -> None:
    assert codes(check_structure(columns(sampled=mask("-----"), spans=()), VOCAB)) == ["nothing_sampled"]


def test_the_mask_covers_exactly_what_an_engine_sampled() -> None:
    finding = only(check_structure(columns(spans=((2, 4),)), VOCAB))
    assert (finding.code, finding.positions) == ("sampled_without_version", (4,))
    finding = only(check_structure(columns(sampled=mask("---xx")), VOCAB))
    assert (finding.code, finding.positions) == ("version_without_mask", (2,))


@pytest.mark.parametrize("spans", [((2, 4), (3, 5)), ((4, 5), (2, 4)), ((2, 6),), ((-1, 5),), ((2, 2), (2, 5))])
def test_spans_that_overlap_run_backwards_or_leave_the_text_are_broken(spans: tuple[tuple[int, int], ...]) -> None:
    assert codes(check_structure(columns(spans=spans), VOCAB)) == ["spans_broken"]


def test_log_probs_and_spans_that_were_not_logged_are_missing_evidence_and_no_failure() -> None:
    found = check_structure(columns(logprobs=None, spans=None), VOCAB)
    assert codes(found) == ["spans_missing", "logprobs_missing"]
    assert {(f.check, f.severity) for f in found} == {(Check.EVIDENCE, CheckSeverity.INCOMPLETE)}


def test_log_probs_that_are_all_zero_count_as_not_logged() -> None:
    finding = only(check_structure(columns(logprobs=np.zeros(5, dtype=np.float32)), VOCAB))
    assert (finding.code, finding.severity) == ("logprobs_all_zero", CheckSeverity.INCOMPLETE)


def test_log_probs_of_sampled_tokens_are_numbers_and_not_above_zero() -> None:
    found = check_structure(columns(logprobs=np.array([0, 0, np.nan, 0.25, -np.inf], dtype=np.float32)), VOCAB)
    assert [(f.code, f.positions) for f in found] == [("logprob_not_finite", (2, 4)), ("logprob_positive", (3,))]
    assert "up to 0.25 nats" in found[1].detail


def test_a_stand_in_for_a_log_prob_is_no_log_prob() -> None:
    finding = only(check_structure(columns(logprobs=np.array([0, 0, -9999, -79.0, -1.0], dtype=np.float32)), VOCAB))
    assert (finding.code, finding.severity, finding.positions) == ("logprob_impossible", CheckSeverity.FAIL, (2,))
    assert "down to -9999" in finding.detail


def test_a_rounding_error_above_zero_is_none() -> None:
    assert check_structure(columns(logprobs=np.array([0, 0, 2e-6, -1.0, -0.1], dtype=np.float32)), VOCAB) == ()


def test_what_stands_where_nothing_was_sampled_does_not_matter() -> None:
    assert check_structure(columns(logprobs=np.array([np.nan, 9.0, -0.5, -1.0, -0.1], dtype=np.float64)), VOCAB) == ()


def test_a_doubled_begin_token_is_that_of_vector_v18(golden: dict[str, Any]) -> None:
    vector = golden["V18_bos"]
    assert doubled_bos(ids(*vector["ids"]), vector["bos"]) is bool(vector["double_bos"])
    assert not doubled_bos(ids(*vector["ids"][1:]), vector["bos"])
    assert not doubled_bos(ids(*vector["ids"]), None)
    assert not doubled_bos(ids(vector["bos"]), vector["bos"])


def test_a_doubled_begin_token_is_a_fault_unless_the_policy_sampled_it() -> None:
    assert codes(check_structure(columns(token_ids=ids(4, 4, 6, 7, 8)), VOCAB, bos_id=4)) == ["doubled_bos"]
    sampled = columns(token_ids=ids(4, 4, 6, 7, 8), sampled=mask("-xxxx"), spans=((1, 5),))
    assert check_structure(sampled, VOCAB, bos_id=4) == ()


# --- drift ------------------------------------------------------------------------------------------------------------

CHAT = ids(START, 5, 6, END, START, 7, 8, 9, END)
WRITTEN = mask("-----xxxx")
"""User `5 6`, then the policy's `7 8 9` and its end token."""


@pytest.mark.parametrize(
    ("got", "kind"),
    [
        (CHAT, None),
        (ids(START, 5, 6, END, START, 7, 8, 9, END, END), DriftKind.SPECIAL_TOKEN_COUNT),
        (ids(START, 5, 6, END, START, 7, 8, 9), DriftKind.SPECIAL_TOKEN_COUNT),
        (ids(START, 5, 6, END, START, 7, 8, 9, TOOL), DriftKind.SPECIAL_TOKEN_TYPE),
        (ids(START, 5, 6, END, START, 7, 8, 9, END, NEWLINE), DriftKind.NON_ASSISTANT_TEXT),
        (ids(START, 5, 6, END, NEWLINE, START, 7, 8, 9, END), DriftKind.NON_ASSISTANT_TEXT),
        (ids(START, 5, END, START, 7, 8, 9, END), DriftKind.NON_ASSISTANT_TEXT),
        (ids(START, 4, 6, END, START, 7, 10, END), DriftKind.NON_ASSISTANT_TEXT),
        (ids(START, 5, 6, END, START, 7, 10, END), DriftKind.ASSISTANT_TEXT),
        (ids(START, 5, 6, END, START, END), DriftKind.ASSISTANT_TEXT),
        (ids(START, 5, 6, END, START, 7, 8, 9, 10, END), DriftKind.ASSISTANT_TEXT),
        (ids(START, 5, 6, END, START, 7, 8, 10, 9, END), DriftKind.ASSISTANT_TEXT),
    ],
    ids=[
        "equal",
        "end token twice",
        "end token lost",
        "another special token",
        "newline after the end token",
        "newline after the user's end token",
        "user text cut",
        "both texts: the graver",
        "merged tokens",
        "answer cleared",
        "answer goes on",
        "token put in",
    ],
)
def test_drift_is_told_by_kind(got: NDArray[np.int32], kind: DriftKind | None) -> None:
    assert classify_drift(CHAT, got, SPECIAL, WRITTEN) is kind


def test_a_cleared_tool_call_is_a_special_token_less_or_other_words_of_the_policy() -> None:
    written = mask("--xxxx")
    with_marks = ids(START, 5, TOOL, 7, 8, END)
    assert classify_drift(with_marks, ids(START, 5, END), SPECIAL, written) is DriftKind.SPECIAL_TOKEN_COUNT
    assert classify_drift(with_marks, ids(START, 5, END), {START, END}, written) is DriftKind.ASSISTANT_TEXT


def test_without_special_tokens_between_them_prompt_and_answer_are_told_apart_by_the_mask() -> None:
    text, written = ids(5, 6, 7, 8), mask("--xx")
    assert classify_drift(text, ids(5, 6, 9), set(), written) is DriftKind.ASSISTANT_TEXT
    assert classify_drift(text, ids(5, 9, 8), set(), written) is DriftKind.NON_ASSISTANT_TEXT
    assert classify_drift(text, ids(5, 6, 7, 8, 9), set(), written) is DriftKind.ASSISTANT_TEXT
    assert classify_drift(text, ids(4, 5, 6, 7, 8), set(), written) is DriftKind.NON_ASSISTANT_TEXT


def test_an_answer_where_none_was_belongs_to_who_closes_the_message() -> None:
    empty = ids(START, END)
    assert classify_drift(empty, ids(START, 7, END), SPECIAL, mask("-x")) is DriftKind.ASSISTANT_TEXT
    assert classify_drift(empty, ids(START, 7, END), SPECIAL, mask("--")) is DriftKind.NON_ASSISTANT_TEXT


def test_the_kind_is_found_whatever_one_token_becomes() -> None:
    """Every single replacement by a plain token is drift of the text that it stands in, or a special token less."""
    for position in range(CHAT.size):
        got = CHAT.copy()
        got[position] = 20
        of_text = DriftKind.ASSISTANT_TEXT if WRITTEN[position] else DriftKind.NON_ASSISTANT_TEXT
        assert classify_drift(CHAT, got, SPECIAL, WRITTEN) is (
            DriftKind.SPECIAL_TOKEN_COUNT if CHAT[position] in SPECIAL else of_text
        )


def test_ids_that_an_environment_saw_and_a_sample_holds_are_the_very_same() -> None:
    assert check_same_ids(CHAT, CHAT.astype(np.int64), SPECIAL, WRITTEN) == ()
    finding = only(check_same_ids(CHAT, ids(START, 5, 6, END, START, 7, 10, END), SPECIAL, WRITTEN))
    assert (finding.check, finding.severity, finding.code) == (
        Check.TOKENIZER,
        CheckSeverity.FAIL,
        "drift_assistant_text",
    )
    assert finding.positions == (6,)


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="one entry a token"):
        classify_drift(CHAT, CHAT, SPECIAL, WRITTEN[1:])
