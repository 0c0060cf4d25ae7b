"""What the audit of a dump comes to. Numpy only; how it is shown is the command's to say."""

from dataclasses import dataclass
from enum import StrEnum

from trainer.config.consistency import GapLimits
from trainer.consistency.checks.mismatch import MismatchMetrics
from trainer.consistency.checks.routing import RoutingAgreement
from trainer.consistency.dump.cells import RowFinding
from trainer.consistency.dump.columns import SamplingKey
from trainer.types.evidence import Attribution, CheckFinding, CheckSeverity


class AuditResult(StrEnum):
    """What the dump as a whole deserves."""

    PASS = "pass"
    """Every sampled token was scored, and nothing failed."""
    INCOMPLETE = "incomplete"
    """Nothing failed, but log-probs are missing or tokens could not be scored."""
    FAIL = "fail"
    """At least one finding failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCounts:
    """What was checked, and what it was checked of."""

    rows: int
    rows_scored: int
    rows_with_versions: int
    rows_with_routing: int
    rows_assumed: dict[SamplingKey, int]
    """Rows for which nobody says this part of their sampling: temperature 1, top_p 1 and top_k 0 were taken."""
    tokens: int
    """Tokens of the rows whose columns could be read."""
    sampled_tokens: int
    scored_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DumpReport:
    """The audit of one dump."""

    counts: AuditCounts
    limits: GapLimits
    metrics: MismatchMetrics | None
    """Over the scored tokens; None without any."""
    row_findings: tuple[RowFinding, ...]
    findings: tuple[CheckFinding, ...]
    """About the dump as a whole."""
    attribution: Attribution | None
    """Causes of the gap of the rows that fail by themselves, or of all rows where only their sum fails; None while the
    gap is within limits."""
    attributed_rows: int
    """Rows that the attribution was asked about."""
    routing: RoutingAgreement | None
    """Over rows that predict a scored token; None without routing, or for a dense model."""

    @property
    def result(self) -> AuditResult:
        """Missing versions and missing routing are findings that are incomplete; missing log-probs make the result
        so."""
        severities = {finding.severity for finding in (*self.findings, *(each.finding for each in self.row_findings))}
        if CheckSeverity.FAIL in severities:
            return AuditResult.FAIL
        counts = self.counts
        complete = (
            counts.rows_scored == counts.rows
            and counts.scored_tokens == counts.sampled_tokens
            and counts.scored_tokens > 0
        )
        return AuditResult.PASS if complete else AuditResult.INCOMPLETE
