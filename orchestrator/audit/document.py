"""The report of `concord audit` as one JSON document: the only form of it, which the table reads too. No array and no
token is in it."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict, cast

from orchestrator.audit.options import AuditOptions
from trainer.consistency.checks.routing import RoutingAgreement
from trainer.consistency.dump.cells import RowFinding
from trainer.consistency.dump.columns import DumpSettings, columns_read
from trainer.consistency.dump.report import DumpReport
from trainer.types.evidence import Attribution, CheckFinding, CheckSeverity

_EXAMPLES = 3
"""Rows of a kind of finding that are shown in full."""
_POSITIONS = 16
"""Positions of a finding that are listed."""
_ORDER = (CheckSeverity.FAIL, CheckSeverity.INCOMPLETE, CheckSeverity.WARN)


class Example(TypedDict):
    """One row of a finding."""

    row: int | None
    """Number of the row, from 0; None: about the dump as a whole."""
    place: str
    detail: str
    positions: list[int]


class FindingKind(TypedDict):
    """All findings of one code about one column."""

    severity: str
    check: str
    code: str
    column: str | None
    """None: about the dump as a whole."""
    count: int
    rows: list[int]
    examples: list[Example]


class AuditDocument(TypedDict):
    """The report."""

    result: str
    file: str
    model: str
    weights: str | None
    layout: str
    columns: dict[str, str]
    dtype: str
    engine_dtype: str
    sampling: dict[str, float]
    more_rows: bool
    checked: dict[str, Any]
    limits: dict[str, float]
    metrics: dict[str, float | None] | None
    findings: list[FindingKind]
    attribution: dict[str, Any] | None
    routing: dict[str, Any] | None


def audit_document(options: AuditOptions, settings: DumpSettings, report: DumpReport, more_rows: bool) -> AuditDocument:
    """The document of a report.

    Args:
        more_rows: the file has rows behind `--limit`.
    """
    return AuditDocument(
        result=str(report.result),
        file=str(options.file),
        model=str(options.model),
        weights=None if options.weights is None else str(options.weights),
        layout=str(settings.layout),
        columns={key: settings.columns.name(key) for key in columns_read(settings.layout)},
        dtype=options.dtype,
        engine_dtype=settings.engine_dtype,
        sampling={str(key): value for key, value in settings.sampling.items()},
        more_rows=more_rows,
        checked=asdict(report.counts),
        limits=report.limits.model_dump(),
        metrics=None if report.metrics is None else asdict(report.metrics),
        findings=[*(_kind(None, [(None, "", each)]) for each in report.findings), *_by_kind(report.row_findings)],
        attribution=None if report.attribution is None else _attribution(report.attribution, report.attributed_rows),
        routing=None if report.routing is None else _routing(report.routing),
    )


def document_json(document: AuditDocument) -> str:
    """One JSON text; a number that is not finite is the text `inf`, `-inf` or `nan`, which JSON has no other way to
    say."""
    return json.dumps(_finite(document), indent=2, allow_nan=False)


def _by_kind(findings: Sequence[RowFinding]) -> Iterable[FindingKind]:
    kinds: dict[tuple[int, str, str, str], list[RowFinding]] = {}
    for each in findings:
        finding = each.finding
        kinds.setdefault((_ORDER.index(finding.severity), finding.check, finding.code, each.column), []).append(each)
    for key in sorted(kinds, key=lambda key: (key[0], -len(kinds[key]), key)):
        found = sorted(kinds[key], key=lambda each: each.row)
        yield _kind(key[3], [(each.row, each.place, each.finding) for each in found])


def _kind(column: str | None, found: Sequence[tuple[int | None, str, CheckFinding]]) -> FindingKind:
    """(row, place, finding) each, all of one kind."""
    first = found[0][2]
    return FindingKind(
        severity=first.severity,
        check=first.check,
        code=first.code,
        column=column,
        count=len(found),
        rows=[row for row, _, _ in found if row is not None],
        examples=[
            Example(row=row, place=place, detail=finding.detail, positions=list(finding.positions[:_POSITIONS]))
            for row, place, finding in found[:_EXAMPLES]
        ],
    )


def _attribution(attribution: Attribution, rows: int) -> dict[str, Any]:
    return {
        "rows": rows,
        "gap": attribution.gap,
        "parts": [
            {"cause": cause, "nats": nats, "reading": reading} for cause, nats, reading in attribution.read_parts
        ],
        "residual": attribution.residual,
        "first": attribution.first,
        "explained": attribution.explained,
    }


def _routing(agreement: RoutingAgreement) -> dict[str, Any]:
    return {
        "rows_compared": agreement.num_rows,
        "coverage": agreement.coverage,
        "hollow_cells": int(agreement.hollow_cells.sum()),
        "mismatch": agreement.mismatch,
        "token_any_mismatch": agreement.token_any_mismatch,
        "jaccard": agreement.jaccard,
        "gate_gap_mismatch": agreement.gate_gap_mismatch,
        "block_mismatch": agreement.block_mismatch.tolist(),
    }


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in cast(Mapping[str, object], value).items()}
    return [_finite(entry) for entry in cast(list[object], value)] if isinstance(value, list) else value
