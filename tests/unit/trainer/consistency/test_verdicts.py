"""What findings lead to: other tokens always reject, the rest does what the config says, and an open question stays on
record."""

from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.consistency.service.verdicts import MAX_SUSPECTS, Decision, OnFail, decide
from trainer.types.evidence import Check, CheckFinding, CheckSeverity
from trainer.types.step import Verdict

GAPS = np.array([0.0, 0.0, 0.01, 0.9, 0.06, 2.0, 0.02, 0.04])
"""The first two tokens were given."""
BOUND = 0.05
ALL_ON_FAIL: tuple[OnFail, ...] = get_args(OnFail)


def finding(
    check: Check, severity: CheckSeverity = CheckSeverity.FAIL, positions: tuple[int, ...] = (), code: str = "planted"
) -> CheckFinding:
    return CheckFinding(check=check, severity=severity, code=code, detail="planted", positions=positions)


GAP = finding(Check.PRECISION, code="gap_mean")


def run(
    *findings: CheckFinding,
    gap: tuple[CheckFinding, ...] = (),
    on_fail: OnFail = "quarantine",
    gaps: NDArray[np.float64] = GAPS,
) -> Decision:
    return decide(findings, gap, on_fail, gaps, token_bound=BOUND)


def test_nothing_found_accepts():
    found = run()
    assert found.verdict is Verdict.ACCEPT and not found.masked.any() and found.findings == ()


@pytest.mark.parametrize("on_fail", ALL_ON_FAIL)
@pytest.mark.parametrize("check", [Check.STRUCTURE, Check.TOKENIZER])
def test_other_tokens_reject_whatever_the_config_says(check: Check, on_fail: OnFail):
    found = run(finding(check), finding(Check.VERSION), gap=(GAP,), on_fail=on_fail)
    assert found.verdict is Verdict.REJECT and not found.masked.any()


@pytest.mark.parametrize(
    ("on_fail", "verdict"),
    [
        ("observe", Verdict.ACCEPT),
        ("mask", Verdict.MASK),
        ("reject", Verdict.REJECT),
        ("quarantine", Verdict.QUARANTINE),
    ],
)
def test_any_other_failure_does_what_the_config_says_and_is_kept(on_fail: OnFail, verdict: Verdict):
    for given, gap in (
        ((), (GAP,)),
        ((finding(Check.VERSION),), ()),
        ((finding(Check.SEMANTICS),), ()),
        ((finding(Check.ROUTING),), ()),
    ):
        found = run(*given, gap=gap, on_fail=on_fail)
        assert found.verdict is verdict and found.findings == (*given, *gap)


@pytest.mark.parametrize("on_fail", ALL_ON_FAIL)
def test_warnings_accept_and_are_kept(on_fail: OnFail):
    warnings = tuple(finding(check, CheckSeverity.WARN) for check in Check)
    found = run(*warnings, gap=(finding(Check.PRECISION, CheckSeverity.WARN),), on_fail=on_fail)
    assert found.verdict is Verdict.ACCEPT and found.findings[:-1] == warnings and not found.masked.any()


@pytest.mark.parametrize("on_fail", ALL_ON_FAIL)
def test_an_open_question_accepts_only_where_nothing_failed_and_keeps_its_reason(on_fail: OnFail):
    open_question = finding(Check.EVIDENCE, CheckSeverity.INCOMPLETE, code="no_trace")
    alone = run(open_question, on_fail=on_fail)
    assert alone.verdict is Verdict.ACCEPT and alone.findings == (open_question,)
    with_failure = run(open_question, gap=(GAP,), on_fail=on_fail)
    assert (with_failure.verdict is Verdict.ACCEPT) == (on_fail == "observe") and open_question in with_failure.findings


def test_tokens_that_nobody_could_score_are_an_open_question_by_themselves():
    gaps = GAPS.copy()
    gaps[[3, 6]] = np.nan
    found = run(gaps=gaps)
    assert found.verdict is Verdict.ACCEPT
    assert [(f.check, f.severity, f.positions) for f in found.findings] == [
        (Check.EVIDENCE, CheckSeverity.INCOMPLETE, (3, 6))
    ]
    asked = finding(Check.EVIDENCE, CheckSeverity.INCOMPLETE)
    assert run(asked, gaps=gaps).findings == (asked,)


def test_a_mask_takes_the_tokens_beyond_the_bound_and_leaves_a_gap_that_passes():
    found = run(gap=(GAP,), on_fail="mask")
    assert np.flatnonzero(found.masked).tolist() == [3, 4, 5]
    assert GAPS[~found.masked].max() <= BOUND


def test_a_mask_takes_tokens_that_were_not_scored_since_nothing_vouches_for_them():
    gaps = GAPS.copy()
    gaps[6] = np.nan
    assert np.flatnonzero(run(gap=(GAP,), on_fail="mask", gaps=gaps).masked).tolist() == [3, 4, 5, 6]


def test_a_mask_takes_the_tokens_that_a_finding_names_or_all_of_them():
    named = run(
        finding(Check.VERSION, positions=(6, 7)),
        finding(Check.ROUTING, CheckSeverity.WARN, positions=(2,)),
        on_fail="mask",
    )
    assert np.flatnonzero(named.masked).tolist() == [6, 7]
    assert run(finding(Check.SEMANTICS), on_fail="mask").masked.all()


@pytest.mark.parametrize("on_fail", ["observe", "reject", "quarantine"])
def test_only_a_mask_masks(on_fail: OnFail):
    assert not run(finding(Check.VERSION, positions=(6,)), gap=(GAP,), on_fail=on_fail).masked.any()


def test_suspects_are_the_largest_gaps_beyond_the_bound_largest_first():
    assert run().suspects == (5, 3)
    assert decide((), (), "observe", GAPS, token_bound=BOUND, suspect_bound=0.03).suspects == (5, 3, 4, 7)
    gaps = np.array([np.inf, np.nan, *[1.0] * 10])
    assert run(gaps=gaps).suspects == (0, *range(2, 9)) and len(run(gaps=gaps).suspects) == MAX_SUSPECTS


def test_gaps_are_one_row_and_bounds_are_positive():
    with pytest.raises(ValueError, match="\\[T\\]"):
        run(gaps=np.zeros((2, 2)))
    with pytest.raises(ValueError, match="positive"):
        decide((), (), "mask", GAPS, token_bound=0.0)
