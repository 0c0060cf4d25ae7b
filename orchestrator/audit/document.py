"""The report of `concord audit` as one JSON document: the only form of it, which the table reads too. No array and no
token is in it."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TypedDict, cast

from orchestrator.audit.options import AuditOptions
from trainer.consistency.checks.routing import RoutingAgreement
from trainer.consistency.dump.cells import RowFinding
from trainer.consistency.dump.columns import DumpSettings, columns_read
from trainer.consistency.dump.report import DumpReport
from trainer.types.evidence import Attribution, CheckFinding, CheckSeverity

_EXAMPLES = 3
"""Rows of a kind of finding that are told in full."""
_POSITIONS = 16
"""Positions of a finding that are listed."""
_ORDER = (CheckSeverity.FAIL, CheckSeverity.INCOMPLETE, CheckSeverity.WARN)


class Example(TypedDict):
    """One row of a finding."""

    row: int | None
    """From 0; None: about the dump as a whole."""
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
    checked: dict[str, object]
    limits: dict[str, float]
    metrics: dict[str, float | None] | None
    findings: list[FindingKind]
    attribution: dict[str, object] | None
    routing: dict[str, object] | None


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
        sampling=cast(dict[str, float], settings.sampling),
        more_rows=more_rows,
        checked=cast(dict[str, object], asdict(report.counts)),
        limits=cast(dict[str, float], report.limits.model_dump()),
        metrics=None if report.metrics is None else cast(dict[str, float | None], asdict(report.metrics)),
        findings=[*(_about_dump(finding) for finding in report.findings), *_by_kind(report.row_findings)],
        attribution=None if report.attribution is None else _attribution(report.attribution, report.attributed_rows),
        routing=None if report.routing is None else _routing(report.routing),
    )


def document_json(document: AuditDocument) -> str:
    """One JSON text; a number that is not finite is the text `inf`, `-inf` or `nan`, which JSON has no other way to
    say."""
    return json.dumps(_finite(document), indent=2, allow_nan=False)


def _by_kind(findings: Sequence[RowFinding]) -> Iterable[FindingKind]:
    kinds: dict[tuple[str, str, str, str], list[RowFinding]] = {}
    for each in findings:
        finding = each.finding
        kinds.setdefault((finding.severity, finding.check, finding.code, each.column), []).append(each)
    for key in sorted(kinds, key=lambda key: (_ORDER.index(CheckSeverity(key[0])), -len(kinds[key]), key)):
        severity, check, code, column = key
        found = sorted(kinds[key], key=lambda each: each.row)
        yield FindingKind(
            severity=str(severity),
            check=str(check),
            code=code,
            column=column,
            count=len(found),
            rows=[each.row for each in found],
            examples=[_example(each) for each in found[:_EXAMPLES]],
        )


def _example(each: RowFinding) -> Example:
    return Example(
        row=each.row, place=each.place, detail=each.finding.detail, positions=list(each.finding.positions[:_POSITIONS])
    )


def _about_dump(finding: CheckFinding) -> FindingKind:
    example = Example(row=None, place="", detail=finding.detail, positions=[])
    return FindingKind(
        severity=str(finding.severity),
        check=str(finding.check),
        code=finding.code,
        column=None,
        count=1,
        rows=[],
        examples=[example],
    )


def _attribution(attribution: Attribution, rows: int) -> dict[str, object]:
    return {
        "rows": rows,
        "gap": attribution.gap,
        "parts": [{"cause": str(cause), "nats": nats} for cause, nats in attribution.parts],
        "residual": attribution.residual,
        "first": str(attribution.first),
        "explained": attribution.explained,
    }


def _routing(agreement: RoutingAgreement) -> dict[str, object]:
    return {
        "rows_compared": agreement.num_rows,
        "coverage": agreement.coverage,
        "hollow_cells": int(agreement.hollow_cells.sum()),
        "mismatch": agreement.mismatch,
        "token_any_mismatch": agreement.token_any_mismatch,
        "jaccard": agreement.jaccard,
        "gate_gap_mismatch": agreement.gate_gap_mismatch,
        "block_mismatch": [float(value) for value in agreement.block_mismatch],
    }


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in cast(Mapping[str, object], value).items()}
    return [_finite(entry) for entry in cast(list[object], value)] if isinstance(value, list) else value
