"""A diagnosis for people (tables) and for machines (one JSON document)."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.doctor.advice import DO_NOT
from orchestrator.doctor.diagnosis import Diagnosis
from orchestrator.doctor.findings import Evidence, Finding, Severity
from orchestrator.metrics.layers import LAYERS

UNTRUSTED = "entropy, KL, clip fractions, importance ratios and weights"
"""What `Diagnosis.untrusted` holds, in words."""
_STYLES = {Severity.INFO: "dim", Severity.WARN: "yellow", Severity.CRITICAL: "bold red"}


def as_json(run: str, diagnosis: Diagnosis, partial: Sequence[str]) -> str:
    """One line of JSON."""
    primary = diagnosis.primary
    return json.dumps(
        {
            "run": run,
            "steps": diagnosis.steps,
            "last_step": diagnosis.last_step,
            "partial": list(partial),
            "learning": diagnosis.learning.value,
            "primary": None if primary is None else primary.cause.value,
            "diagnosis_layer": 0 if primary is None else primary.layer,
            "severity": None if primary is None else primary.severity.value,
            "untrusted": list(diagnosis.untrusted),
            "findings": [_finding(finding) for finding in diagnosis.findings],
        }
    )


def _finding(finding: Finding) -> dict[str, object]:
    return {
        "cause": finding.cause.value,
        "diagnosis_layer": finding.layer,
        "severity": finding.severity.value,
        "since": finding.since,
        "summary": finding.summary,
        "evidence": [
            asdict(one) | {"numbers": {name: value if math.isfinite(value) else None for name, value in one.numbers}}
            for one in finding.evidence
        ],
        "do": list(finding.advice.do),
        "do_not": list(finding.advice.do_not),
    }


def show(console: Console, run: str, diagnosis: Diagnosis, partial: Sequence[str]) -> None:
    """Tables: the primary finding in full, the others below it."""
    primary = diagnosis.primary
    console.print(Text(f"{run}: {diagnosis.steps} steps read, up to step {diagnosis.last_step}"))
    for one in partial:
        console.print(Text(f"partial: {one}", style="yellow"))
    if primary is None:
        console.print(Text("nothing found that needs mending", style="green"))
    else:
        console.print(
            Text(
                f"primary finding: {primary.cause}, layer {primary.layer} ({LAYERS[primary.layer].name})",
                style=_STYLES[primary.severity],
            )
        )
    for finding in diagnosis.findings:
        console.print(_table(finding))
    if diagnosis.untrusted:
        console.print(
            Text(
                f"while a finding of layer 4 stands, do not trust {UNTRUSTED}: {', '.join(diagnosis.untrusted)}",
                style="yellow",
            )
        )


def _table(finding: Finding) -> Table:
    title = Text(
        f"{finding.severity} · layer {finding.layer} · {finding.cause} · since step {finding.since}",
        style=_STYLES[finding.severity],
    )
    table = Table(title=title, title_justify="left", show_header=False, expand=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("what", Text(finding.summary))
    for one in finding.evidence:
        table.add_row("evidence", Text(evidence_text(one)))
    if finding.severity is not Severity.INFO:
        for text in finding.advice.do:
            table.add_row("do", Text(text))
        for text in finding.advice.do_not:
            table.add_row("do not", Text(text.removeprefix(DO_NOT)))
    return table


def evidence_text(one: Evidence) -> str:
    """A series with its window and the numbers that decided."""
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in one.numbers)
    note = f" ({one.note})" if one.note else ""
    steps = (
        f"step {one.first_step}" if one.first_step == one.last_step else f"steps {one.first_step} to {one.last_step}"
    )
    return f"{one.series}, {steps}: {numbers}{note}"
