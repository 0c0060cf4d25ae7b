"""What a rule answers: a cause with its severity, and the evidence for it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from orchestrator.doctor.advice import ADVICE, Advice
from orchestrator.metrics.causes import LAYER, Cause


class Severity(StrEnum):
    """How bad a finding is."""

    INFO = "info"
    """Worth knowing; nothing to mend."""
    WARN = "warn"
    """Look at it soon."""
    CRITICAL = "critical"
    """What is trained now is lost, or harmful."""

    @property
    def rank(self) -> int:
        """1 info, 2 warn, 3 critical."""
        return tuple(Severity).index(self) + 1


def counted(number: int, what: str, several: str = "") -> str:
    """`1 step`, `3 steps`; `several` is the plural where it is not made by an s."""
    return f"{number} {what if number == 1 else several or f'{what}s'}"


Numbers: TypeAlias = tuple[tuple[str, float], ...]
"""(what, value): what was measured, and the limit it was held against."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One series, where it was looked at, and the numbers that decided."""

    series: str
    """A column of the metric parts, a kind of event, or `failed:REASON` and `rejected:REASON`."""
    first_step: int
    last_step: int
    numbers: Numbers
    note: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a rule found."""

    cause: Cause
    severity: Severity
    since: int
    """Step at which it began, as far as the window shows."""
    summary: str
    """One sentence with the numbers."""
    evidence: tuple[Evidence, ...]

    @property
    def layer(self) -> int:
        """Layer of diagnosis, 1 to 4."""
        return LAYER[self.cause]

    @property
    def advice(self) -> Advice:
        """What to do and what not."""
        return ADVICE[self.cause]
