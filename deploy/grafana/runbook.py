"""The runbook as a dashboard: a text for each alert (docs/user/runbook.md) and for each cause that the doctor finds
(its advice), so that every alert and finding on the other dashboards is a link to what to do, wherever Grafana runs."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from shape import alert_rules

from orchestrator.doctor.advice import ADVICE
from orchestrator.metrics.causes import LAYER, Cause

PAGE = Path(__file__).resolve().parents[2] / "docs" / "user" / "runbook.md"
UID, TITLE = "concord-runbook", "Concord: runbook"
ABOUT = "What each alert and each finding of the doctor means, what to check first, and what not to do."


@dataclass(frozen=True)
class Section:
    """One text."""

    id: int
    """Of its panel."""
    name: str
    text: str
    """Markdown."""


@cache
def alert_sections() -> dict[str, Section]:
    """The sections of the page that stand for alerts, by the alert's name.

    Raises:
        KeyError: an alert has no section.
    """
    parts = re.split(r"^### (\w+)$", PAGE.read_text(), flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {
        name: Section(number, name, _linked(re.split(r"^## ", texts[name], flags=re.MULTILINE)[0].strip()))
        for number, name in enumerate(alert_rules(), start=1)
    }


@cache
def cause_sections() -> dict[str, Section]:
    """What to do about each cause, by its name."""
    first = len(alert_rules()) + 1
    return {str(cause): Section(number, str(cause), _advice(cause)) for number, cause in enumerate(Cause, start=first)}


def link_to(section: Section) -> str:
    """The address in Grafana that shows the section alone."""
    return f"/d/{UID}?viewPanel={section.id}&${{run:queryparam}}&${{datasource:queryparam}}"


def _linked(text: str) -> str:
    """Links to other sections are links to their panels; those to other pages lose their address."""
    numbers = {name.lower(): number for number, name in enumerate(alert_rules(), start=1)}
    text = re.sub(
        r"\[([^\]]+)\]\(#(\w+)\)",
        lambda found: f"[{found[1]}](/d/{UID}?viewPanel={numbers[found[2]]})" if found[2] in numbers else found[1],
        text,
    )
    return re.sub(r"\[([^\]]+)\]\([\w./]+\.md[^)]*\)", r"\1", text)


def _advice(cause: Cause) -> str:
    advice = ADVICE[cause]
    steps = "\n".join(f"1. {step}" for step in advice.do)
    return "\n\n".join((f"Layer {LAYER[cause]}. **Do:**", steps, *advice.do_not))
