"""The report of `concord audit` for people. It reads the document, so that table and JSON cannot disagree."""

from typing import cast

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
    console = Console()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"audit of {document['file']} against {document['model']}: {document['result'].upper()}")
    for line in _checked(document):
        say(f"  {line}")
    if document["metrics"] is not None:
        console.print(_metrics(document))
    _show_findings(console, document["findings"])
    if document["attribution"] is not None:
        for line in _attribution(document["attribution"]):
            say(line)
    if document["routing"] is not None:
        say(_routing(document["routing"]))


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
    assumed = [f"{key} of {count} rows" for key, count in cast(dict[str, int], counts["rows_assumed"]).items() if count]
    silent = f"; nobody says {', '.join(assumed)}: temperature 1 without truncation assumed" if assumed else ""
    return [
        f"checked: {rows}; {tokens}",
        f"evidence: {versions}; scored {under}, in {document['dtype']}; engine {document['engine_dtype']}",
        f"sampling: {said or 'as the rows say'}{silent}",
    ]


def _metrics(document: AuditDocument) -> Table:
    table = Table(title="log-probs of the model minus those of the dump")
    for header in ("", "measured", "warn", "fail"):
        table.add_column(header, justify="left" if not header else "right")
    metrics, limits = document["metrics"] or {}, document["limits"]
    for what, key, limit in _MEASURED:
        bound = "below" if limit == "ess" else "above"
        bounds = (f"{bound} {limits[f'{limit}_warn']:g}", f"{bound} {limits[f'{limit}_fail']:g}") if limit else ("", "")
        value = metrics[key]
        table.add_row(what, "-" if value is None else f"{value:.4g}", *bounds)
    return table


def _show_findings(console: Console, findings: list[FindingKind]) -> None:
    if not findings:
        console.print("findings: none", highlight=False)
        return
    console.print("findings:", highlight=False)
    for kind in findings:
        where = "all rows together" if kind["column"] is None else f"column {kind['column']!r}, {_rows(kind)}"
        console.print(
            f"  {kind['severity']:<10} {kind['code']}: {where}", markup=False, highlight=False, soft_wrap=True
        )
        first = kind["examples"][0]
        place = f"{first['place']}: " if first["place"] else ""
        at = f" (tokens {', '.join(map(str, first['positions']))})" if first["positions"] else ""
        console.print(f"             {place}{first['detail']}{at}", markup=False, highlight=False, soft_wrap=True)


def _rows(kind: FindingKind) -> str:
    first = ", ".join(map(str, kind["rows"][:_FIRST_ROWS]))
    more = ", ..." if kind["count"] > _FIRST_ROWS else ""
    return f"{kind['count']} row{'s' if kind['count'] > 1 else ''} ({first}{more})"


def _attribution(attribution: dict[str, object]) -> list[str]:
    gap, residual = cast(float, attribution["gap"]), cast(float, attribution["residual"])
    parts = cast(list[dict[str, object]], attribution["parts"])
    told = [
        f"  {part['cause']}: {cast(float, part['nats']):.3g} nats ({cast(float, part['nats']) / gap:.0%})"
        for part in parts
        if gap > 0
    ]
    return [
        f"attribution of {gap:.3g} nats a token, over {attribution['rows']} rows:",
        *told,
        f"  unexplained: {residual:.3g} nats",
    ]


def _routing(routing: dict[str, object]) -> str:
    compared = (
        f"routing: {routing['rows_compared']} inputs compared, {cast(float, routing['coverage']):.1%} of those that "
        "predict a sampled token"
    )
    hollow = f"; {routing['hollow_cells']} cells hold no real choice" if routing["hollow_cells"] else ""
    cells, inputs = cast(float, routing["mismatch"]), cast(float, routing["token_any_mismatch"])
    mismatch = f"experts differ in {cells:.2%} of cells (input x block) and {inputs:.2%} of inputs"
    return f"{compared}{hollow}; {mismatch}"
