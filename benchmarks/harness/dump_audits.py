"""Audits of planted dumps, judged: which cause comes first, and whether its words are right."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.consistency.dump.audit import open_audit
from trainer.consistency.dump.columns import dump_settings
from trainer.consistency.dump.report import AuditResult, DumpReport
from trainer.types.evidence import CheckSeverity, GapCause

from .dump_faults import ASKED, UNASKED, Fault, Planted, Room, build_room
from .dump_healthy import healthy


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an audit said about one dump."""

    named: str
    """First cause; `rows` where rows are named instead; `none`."""
    words: str
    """Reading of the first part, or detail of what names rows."""
    explained: float
    right: bool
    wrong: bool
    """A name that is not the right one."""
    asked_tokens: int
    """Tokens of what-if questions."""
    scored_tokens: int
    """Tokens of the dump."""
    seconds: float


def audit(room: Room, planted: Planted) -> tuple[DumpReport, int, float]:
    """The report, tokens that went through the model, and wall seconds, without those of loading it."""
    rows, options = planted
    dtype: str = options.get("dtype", "float32")
    settings = dump_settings(options.get("layout", "tokens"), [], {}, options.get("engine_dtype", dtype))
    opened = open_audit(room.model, options.get("weights"), settings, dtype)
    read = [opened.reader.read(number, f"row {number}", row) for number, row in enumerate(rows)]
    begun = time.perf_counter()
    report = opened.audit(read)
    return report, opened.scored_tokens, time.perf_counter() - begun


def judge(room: Room, fault: Fault) -> Outcome:
    """Audit a fault and hold the answer against the right one."""
    report, tokens, seconds = audit(room, fault.plant(room))
    found = report.attribution
    first = GapCause.UNKNOWN if found is None else found.first
    named, words = ("none" if first is GapCause.UNKNOWN else str(first)), ""
    if found is not None and found.parts:
        words = max(zip(found.parts, found.readings, strict=True), key=lambda each: each[0][1])[1]
    details = [finding.detail for finding in report.findings if finding.code == "gap_in_some_rows"]
    if named == "none" and details:
        named, words = "rows", details[0]
    right = named == fault.cause and fault.words in words
    return Outcome(
        named=named,
        words=words,
        explained=0.0 if found is None else found.explained,
        right=right or (fault.cause == "none" and named == "rows"),
        wrong=named not in ("none", "rows", fault.cause) or (named == fault.cause and not right),
        asked_tokens=tokens - report.counts.tokens,
        scored_tokens=report.counts.tokens,
        seconds=seconds,
    )


def silent(room: Room, planted: Planted) -> bool:
    """Whether a healthy dump has no finding that warns or fails, and passes."""
    report, _, _ = audit(room, planted)
    loud = (CheckSeverity.FAIL, CheckSeverity.WARN)
    findings = (*report.findings, *(each.finding for each in report.row_findings))
    quiet = not any(finding.severity in loud for finding in findings)
    return quiet and report.result is AuditResult.PASS and report.attribution is None


def table(folder: Path, architecture: str, seed: int, rows: int) -> dict[str, Any]:
    """Every fault and every healthy dump of one model."""
    room = build_room(folder / f"{architecture}-{seed}", architecture, seed, rows)
    asked = {fault.name: judge(room, fault) for fault in ASKED}
    unasked = {fault.name: judge(room, fault) for fault in UNASKED}
    sound = {name: silent(room, planted) for name, planted in healthy(room)}
    return {
        "right": sum(outcome.right for outcome in asked.values()),
        "of": len(asked),
        "wrong_names": [name for name, outcome in (asked | unasked).items() if outcome.wrong],
        "missed": [name for name, outcome in asked.items() if not outcome.right],
        "loud_though_healthy": [name for name, quiet in sound.items() if not quiet],
        "healthy": len(sound),
        "faults": {name: vars_of(outcome) for name, outcome in (asked | unasked).items()},
    }


def vars_of(outcome: Outcome) -> dict[str, Any]:
    """For the JSON."""
    return {
        "named": outcome.named,
        "words": outcome.words,
        "explained": round(outcome.explained, 3),
        "asked_tokens": outcome.asked_tokens,
        "dump_tokens": outcome.scored_tokens,
        "seconds": round(outcome.seconds, 3),
    }
