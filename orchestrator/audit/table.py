"""The report of `concord audit` for people. It reads the document, so that table and JSON cannot disagree."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.audit.document import AuditDocument, FindingKind

_MEASURED = (
    ("mean |d|, nats", "abs_difference_mean", "mean_abs"),
    ("mean k3, nats", "k3_mean", "k3"),
    ("effective sample size", "ess_fraction_raw", "ess"),
    ("99 % of |d| below, nats", "abs_difference_p99", ""),
    ("max |d|, nats", "abs_difference_max", ""),
    ("ratio beyond a factor of 2", "fraction_beyond_factor_2", ""),
    ("mean |probability difference|", "probability_difference_mean", ""),
    ("Pearson of probabilities", "probability_pearson", ""),
    ("perplexity ratio", "perplexity_ratio", ""),
)
"""(what, key of the metric, start of the keys of its limits)."""
_FIRST_ROWS = 5


def show_audit(document: AuditDocument) -> None:
    """Print the result, what was checked, the metrics with their limits, the findings and the attribution."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(f"audit of {document['file']} against {document['model']}: {document['result'].upper()}")
    for line in _checked(document):
        console.print(f"  {line}")
    if document["metrics"] is not None:
        console.print(_metrics(document, document["metrics"]), soft_wrap=False)
    console.print("findings:" if document["findings"] else "findings: none")
    for kind in document["findings"]:
        where = "all rows together" if kind["column"] is None else f"column {kind['column']!r}, {_rows(kind)}"
        console.print(f"  {kind['severity']:<10} {kind['code']}: {where}")
        first = kind["examples"][0]
        place = f"{first['place']}: " if first["place"] else ""
        at = f" (tokens {', '.join(map(str, first['positions']))})" if first["positions"] else ""
        console.print(f"             {place}{first['detail']}{at}")
    for line in (*_attribution(document["attribution"] or {}), *_routing(document["routing"] or {})):
        console.print(line)


def _checked(document: AuditDocument) -> list[str]:
    counts = document["checked"]
    rows = (
        f"{counts['rows']} rows{' (the first; the file has more)' if document['more_rows'] else ''}, "
        f"{counts['rows_scored']} of them scored"
    )
    tokens = f"{counts['tokens']} tokens, {counts['sampled_tokens']} sampled, {counts['scored_tokens']} of them scored"
    versions = f"version in {counts['rows_with_versions']} rows, routing in {counts['rows_with_routing']}"
    under = "each token at its version" if document["weights"] is not None else "every token with this one model"
    said = ", ".join(f"{key} {value:g}" for key, value in document["sampling"].items())
    assumed = [f"{key} of {count} rows" for key, count in counts["rows_assumed"].items() if count]
    silent = f"; not given: {', '.join(assumed)}, so temperature 1 without truncation is assumed" if assumed else ""
    return [
        f"checked: {rows}; {tokens}",
        f"evidence: {versions}; scored {under}, in {document['dtype']}; engine {document['engine_dtype']}",
        f"sampling: {said or 'as the rows say'}{silent}",
    ]


def _metrics(document: AuditDocument, metrics: Mapping[str, float | None]) -> Table:
    table = Table(title="log-probs of the model minus those of the dump")
    for header in ("", "measured", "warn", "fail"):
        table.add_column(header, justify="left" if not header else "right")
    limits = document["limits"]
    for what, key, limit in _MEASURED:
        bound = "below" if limit == "ess" else "above"
        bounds = (f"{bound} {limits[f'{limit}_warn']:g}", f"{bound} {limits[f'{limit}_fail']:g}") if limit else ("", "")
        value = metrics[key]
        table.add_row(what, "-" if value is None else f"{value:.4g}", *bounds)
    return table


def _rows(kind: FindingKind) -> str:
    first = ", ".join(map(str, kind["rows"][:_FIRST_ROWS]))
    more = ", ..." if kind["count"] > _FIRST_ROWS else ""
    return f"{kind['count']} row{'s' if kind['count'] > 1 else ''} ({first}{more})"


def _attribution(attribution: Mapping[str, Any]) -> Iterator[str]:
    if not attribution:
        return
    gap = attribution["gap"]
    yield f"attribution of {gap:.3g} nats a token, over {attribution['rows']} rows:"
    for part in attribution["parts"] if gap > 0 else ():
        reading = f": {part['reading']}" if part["reading"] else ""
        yield f"  {part['cause']}: {part['nats']:.3g} nats ({part['nats'] / gap:.0%}){reading}"
    yield f"  unexplained: {attribution['residual']:.3g} nats"


def _routing(routing: Mapping[str, Any]) -> Iterator[str]:
    if not routing:
        return
    hollow = f"; {routing['hollow_cells']} cells hold no real choice" if routing["hollow_cells"] else ""
    yield (
        f"routing: {routing['rows_compared']} inputs compared, {routing['coverage']:.1%} of those that predict a "
        f"sampled token{hollow}; experts differ in {routing['mismatch']:.2%} of cells (input x block) and "
        f"{routing['token_any_mismatch']:.2%} of inputs"
    )
