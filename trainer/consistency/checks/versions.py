"""Whether the versions that a trajectory claims can be true: its spans against the ledger.

It owns the four rules of a span (known, committed, never backwards, never negative) and must never know weights,
log-probs or clocks: a version comes from the engine's spans, never from when something was sent or finished. That spans
cover exactly the sampled tokens, and that no version is negative, is checked where the values are built; nothing here
fills a version in.
"""

from collections.abc import Collection
from itertools import pairwise

from rollout.types.trajectory import Trajectory, VersionSpan
from rollout.types.weights import PolicyVersion
from trainer.types.evidence import Check, CheckFinding, CheckSeverity


def check_versions(
    trajectory: Trajectory, *, known: Collection[PolicyVersion], committed: PolicyVersion
) -> tuple[CheckFinding, ...]:
    """One finding a span that cannot be true; each fails, and names the span's tokens.

    A token newer than what the ledger has committed would have a negative age, which every bound on staleness lets
    through.

    Args:
        known: policies of the ledger, in this run's lineage.
        committed: the newest policy that the ledger has committed.

    Source: CONSISTENCY.md, section 4, Version; ARCHITECTURE.md, section 4.
    """
    found = [
        finding for span in trajectory.version_spans if (finding := _against_ledger(span, known, committed)) is not None
    ]
    found += [
        _regressed(earlier, later)
        for earlier, later in pairwise(trajectory.version_spans)
        if not _follows(earlier.policy, later.policy)
    ]
    return tuple(found)


def _against_ledger(
    span: VersionSpan, known: Collection[PolicyVersion], committed: PolicyVersion
) -> CheckFinding | None:
    policy = span.policy
    claim = f"tokens [{span.start}, {span.end}) claim {policy.key}"
    if policy not in known:
        return _finding(span, "unknown_version", f"{claim}; expected one of the {len(known)} policies of the ledger")
    if policy > committed or policy.version > committed.version:
        return _finding(span, "uncommitted_version", f"{claim}; expected at most {committed.key}, the committed one")
    return None


def _follows(earlier: PolicyVersion, later: PolicyVersion) -> bool:
    """Neither epoch nor version may fall: a trainer that resumed behind the earlier version has orphaned its tokens."""
    return later.trainer_epoch >= earlier.trainer_epoch and later.version >= earlier.version


def _regressed(earlier: VersionSpan, later: VersionSpan) -> CheckFinding:
    detail = (
        f"tokens [{later.start}, {later.end}) claim {later.policy.key} after {earlier.policy.key}; expected versions "
        "that never fall within a trajectory"
    )
    return _finding(later, "version_regressed", detail)


def _finding(span: VersionSpan, code: str, detail: str) -> CheckFinding:
    return CheckFinding(
        check=Check.VERSION,
        severity=CheckSeverity.FAIL,
        code=code,
        detail=detail,
        positions=tuple(range(span.start, span.end)),
    )
