"""Whether the versions that a trajectory claims can be true: its spans against the ledger.

It owns the four rules of a span (known, committed, never backwards, never negative) and must never know weights,
log-probs or clocks: a version comes from the engine's spans, never from when something was sent or finished. That spans
cover exactly the sampled tokens, and that no version is negative, is checked where the values are built; nothing here
fills a version in.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from rollout.types.trajectory import Trajectory, VersionSpan
from rollout.types.weights import PolicyVersion
from trainer.types.evidence import Check, CheckFinding


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
    return tuple(_untrue(trajectory.version_spans, known, committed))


def _untrue(
    spans: Sequence[VersionSpan], known: Collection[PolicyVersion], committed: PolicyVersion
) -> Iterator[CheckFinding]:
    for span in spans:
        policy = span.policy
        if policy not in known:
            yield _finding(span, "unknown_version", f"; expected one of the {len(known)} policies of the ledger")
        elif policy > committed or policy.version > committed.version:
            yield _finding(span, "uncommitted_version", f"; expected at most {committed.key}, the committed one")
    for earlier, later in pairwise(spans):
        if not _follows(earlier.policy, later.policy):
            detail = f" after {earlier.policy.key}; expected versions that never fall within a trajectory"
            yield _finding(later, "version_regressed", detail)


def _follows(earlier: PolicyVersion, later: PolicyVersion) -> bool:
    """Neither epoch nor version may fall: a trainer that resumed behind the earlier version has orphaned its tokens."""
    return later.trainer_epoch >= earlier.trainer_epoch and later.version >= earlier.version


def _finding(span: VersionSpan, code: str, problem: str) -> CheckFinding:
    detail = f"tokens [{span.start}, {span.end}) claim {span.policy.key}{problem}"
    return CheckFinding.failure(Check.VERSION, code, detail, tuple(range(span.start, span.end)))
