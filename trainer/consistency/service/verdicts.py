"""From findings to a verdict: what may be done with a trajectory, which tokens leave its loss, and which ones deserve a
closer look.

It owns that mapping alone and must never know how a finding came about. Pure numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainer.consistency.checks.mismatch import TAIL_NATS
from trainer.types.evidence import Check, CheckFinding, CheckSeverity
from trainer.types.step import Verdict

OnFail = Literal["observe", "mask", "reject", "quarantine"]
MAX_SUSPECTS = 8
"""Suspects of one trajectory."""
_VERDICTS = {
    "observe": Verdict.ACCEPT,
    "mask": Verdict.MASK,
    "reject": Verdict.REJECT,
    "quarantine": Verdict.QUARANTINE,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """What was decided about one trajectory of T tokens."""

    verdict: Verdict
    masked: NDArray[np.bool_]
    """[T] tokens that leave the loss; all False unless the verdict is `mask`."""
    suspects: tuple[int, ...]
    """Positions with the largest |d|, largest first, at most `MAX_SUSPECTS`."""
    findings: tuple[CheckFinding, ...]
    """All of them, in order, those that could not be checked included: an acceptance with an open question says so."""


def decide(
    findings: Sequence[CheckFinding],
    gap_findings: Sequence[CheckFinding],
    on_fail: OnFail,
    gaps: NDArray[np.floating],
    *,
    token_bound: float,
    suspect_bound: float = TAIL_NATS,
) -> Decision:
    """Other tokens or a broken structure reject whatever `on_fail` says: no weight repairs them. Any other failure does
    what `on_fail` says. Warnings and open questions alone accept; both stay among the findings, and tokens that nobody
    could score add one of their own.

    Under `mask` leave the loss: the positions of failed findings (every token where one names none); and where the gap
    failed, every token beyond `token_bound` and every one that was not scored, so that the tokens which stay are known
    to lie within the bound.

    Args:
        findings: of structure, tokenizer, semantics, versions, routing, evidence.
        gap_findings: of the measured gap (`check_gap`).
        on_fail: what a failure leads to.
        gaps: [T] |d| in nats, 0 where not sampled, NaN where sampled and not scored.
        token_bound: |d| in nats. `limits.mean_abs_fail` makes what stays in the loss pass the ceiling by construction.
        suspect_bound: |d| in nats from where on a token is a suspect.

    Raises:
        ValueError: `gaps` is not [T], or a bound is not positive.
    """
    if gaps.ndim != 1 or not (token_bound > 0.0 and suspect_bound > 0.0):
        raise ValueError(
            f"got gaps {gaps.shape}, bounds {token_bound} and {suspect_bound}; expected [T] and positive nats"
        )
    kept = (*findings, *gap_findings, *_unscored(gaps, (*findings, *gap_findings)))
    verdict = Verdict.ACCEPT
    if any(finding.breaks_tokens for finding in kept):
        verdict = Verdict.REJECT
    elif any(finding.failed for finding in kept):
        verdict = _VERDICTS[on_fail]
    masked = np.zeros(gaps.shape, dtype=np.bool_)
    if verdict is Verdict.MASK:
        masked = _masked(findings, gap_findings, gaps, token_bound)
    return Decision(verdict=verdict, masked=masked, suspects=_suspects(gaps, suspect_bound), findings=kept)


def _unscored(gaps: NDArray[np.floating], findings: Sequence[CheckFinding]) -> tuple[CheckFinding, ...]:
    """Tokens without a score are an open question, unless a finding has asked it already."""
    positions = np.flatnonzero(np.isnan(gaps))
    if positions.size == 0 or any(
        finding.severity is CheckSeverity.INCOMPLETE and finding.check is Check.EVIDENCE for finding in findings
    ):
        return ()
    detail = f"{positions.size} sampled tokens have no score at their version; expected one each"
    return (CheckFinding.open_question("tokens_not_scored", detail, tuple(positions.tolist())),)


def _masked(
    findings: Sequence[CheckFinding],
    gap_findings: Sequence[CheckFinding],
    gaps: NDArray[np.floating],
    token_bound: float,
) -> NDArray[np.bool_]:
    masked = np.zeros(gaps.shape, dtype=np.bool_)
    for finding in findings:
        if finding.failed:
            masked[list(finding.positions) if finding.positions else slice(None)] = True
    if any(finding.failed for finding in gap_findings):
        masked |= ~(np.abs(gaps) <= token_bound)
    return masked


def _suspects(gaps: NDArray[np.floating], bound: float) -> tuple[int, ...]:
    size = np.where(np.isnan(gaps), 0.0, np.abs(gaps))
    order = np.argsort(-size, kind="stable")[:MAX_SUSPECTS]
    return tuple(int(position) for position in order if size[position] > bound)
