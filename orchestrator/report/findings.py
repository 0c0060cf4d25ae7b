"""What was found, as cards: the doctor's findings in causal order, and the tokens behind gradient spikes in their
text."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from orchestrator.doctor.diagnosis import Diagnosis, diagnose
from orchestrator.doctor.findings import Finding, Severity, counted
from orchestrator.doctor.tables import UNTRUSTED, evidence_text
from orchestrator.metrics.layers import LAYERS
from orchestrator.report.drawing import shown
from orchestrator.report.page import Card, PageSection, Table, TokenInContext
from orchestrator.run_dir.record import Record
from orchestrator.run_dir.search_records import readable_searches

MOST_CULPRITS = 20
"""Cards; further culprits are in the files."""
MOST_SEARCHES = 50
"""Rows of the table, the newest."""


def findings_section(record: Record) -> PageSection:
    """The doctor's answer to the run as it is on disk."""
    found = diagnose(record)
    return PageSection(
        key="findings",
        title="Findings",
        intro=_summary(found),
        cards=tuple(_finding(finding) for finding in found.findings),
    )


def _summary(found: Diagnosis) -> str:
    if found.primary is None:
        return f"The doctor looked at {found.steps} steps and found nothing that needs mending."
    untrusted = f" Until the findings of layer 4 are mended, do not trust {UNTRUSTED}." if found.untrusted else ""
    return f"In causal order: look at the first one first, it may have caused the others.{untrusted}"


def _finding(finding: Finding) -> Card:
    advice = finding.advice if finding.severity is not Severity.INFO else None
    return Card(
        tag=f"{finding.severity} · {finding.layer} {LAYERS[finding.layer].name}",
        title=f"{finding.cause.replace('_', ' ')}, since step {finding.since}",
        colour=LAYERS[finding.layer].colour,
        lines=(
            finding.summary,
            *(f"Evidence: {evidence_text(one)}" for one in finding.evidence),
            *(() if advice is None else (f"Do: {' '.join(advice.do)}", " ".join(advice.do_not))),
        ),
    )


def gradloc_section(folder: Path) -> PageSection:
    """Gradient searches and their culprits."""
    title = "Gradient searches (GradLoc)"
    searches, broken = readable_searches(folder, _of_file)
    lost = f" {len(broken)} files of gradloc/ cannot be read." if broken else ""
    if not searches:
        return PageSection(key="gradloc", title=title, intro=f"No step's gradient was searched.{lost}")
    culprits = [
        (policy, search, culprit)
        for policy, search in searches
        if search.get("outcome") == "located"
        for culprit in search["culprits"]
    ]
    forgone = sum(search.get("outcome") == "not_searched" for _, search in searches)
    in_vain = f" and {counted(forgone, 'step')} that asked for one when trainer.gradloc.spike_passes were spent"
    more = f" The first {MOST_CULPRITS} culprits are shown." if len(culprits) > MOST_CULPRITS else ""
    return PageSection(
        key="gradloc",
        title=title,
        intro=(
            f"{counted(len(searches) - forgone, 'search', 'searches')}{in_vain if forgone else ''}, "
            f"{counted(len(culprits), 'token')} located; no other outcome names a cause. All numbers: concord "
            f"gradloc RUN STEP.{more}{lost}"
        ),
        cards=tuple(_culprit(policy, search, culprit) for policy, search, culprit in culprits[:MOST_CULPRITS]),
        table=Table(
            ("step", "outcome", "trigger", "norm", "threshold", "explained", "passes", "seconds"),
            [_row(*each) for each in searches[-MOST_SEARCHES:]],
        ),
    )


def _of_file(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(policy, search) of each search in a file."""
    for search in cast("Sequence[Mapping[str, Any]]", document["searches"]):
        yield str(document["policy"]), {**search, "culprits": [dict(culprit) for culprit in search["culprits"]]}


def _row(policy: str, search: Mapping[str, Any]) -> Sequence[str]:
    numbers = [_number(search.get(name)) for name in ("grad_norm", "threshold", "explained")]
    return (
        policy,
        str(search.get("outcome")),
        str(search.get("trigger")),
        *numbers,
        shown(search.get("passes")),
        _number(search.get("seconds")),
    )


def _culprit(policy: str, search: Mapping[str, Any], culprit: Mapping[str, Any]) -> Card:
    get = culprit.get
    numbers = ", ".join(
        f"{key.replace('_', ' ')} {_number(get(key))}" for key in ("omega", "sequence_ratio", "advantage", "entropy")
    )
    return Card(
        tag=f"{search.get('outcome')} · type {get('type')}",
        title=f"step {policy}: position {get('position')} of {get('trajectory_id')}",
        colour=LAYERS[3].colour,
        lines=(
            (
                f"Norm {_number(get('norm'))} of the step's {_number(search.get('grad_norm'))} (threshold "
                f"{_number(search.get('threshold'))}); "
                f"{numbers}; sampled under {get('policy')} by "
                f"replica {get('replica')}; done about it: {search.get('acted')}."
            ),
        ),
        token=TokenInContext(str(get("text_before", "")), str(get("token_text", "")), str(get("text_after", ""))),
    )


def _number(value: object) -> str:
    return "not finite" if value is None else shown(value)
