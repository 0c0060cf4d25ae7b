"""One row of a dump as it is read: its cells by key, and what was wrong with them. It must never know layouts or
models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from trainer.consistency.dump.columns import ColumnKey, DumpSettings
from trainer.types.evidence import Check, CheckFinding, CheckSeverity

_Value = TypeVar("_Value")
EvidenceKey = Literal["logprobs", "version", "routing"]
"""What checks need and a dump may lack: then they are incomplete, and nothing takes its place."""
_EVIDENCE: tuple[ColumnKey, ...] = ("logprobs", "version", "routing")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFinding:
    """A finding with its row and column."""

    row: int
    """From 0."""
    place: str
    """File and line, or file and row."""
    column: str
    finding: CheckFinding


class Cells:
    """The cells of one row. A null counts as absent."""

    def __init__(self, number: int, place: str, row: Mapping[str, object], settings: DumpSettings) -> None:
        self.number, self.place = number, place
        self._row = {name: value for name, value in row.items() if value is not None}
        self._columns, self._named = settings.columns, settings.named
        self.findings: list[RowFinding] = []

    @property
    def failed(self) -> bool:
        """Whether something was unfit."""
        return any(each.finding.severity is CheckSeverity.FAIL for each in self.findings)

    def column(self, key: ColumnKey) -> str:
        """The column that `key` is read from."""
        return self._columns.name(key)

    def has(self, key: ColumnKey) -> bool:
        """Whether the row has a value for it."""
        return self.column(key) in self._row

    def is_named(self, key: ColumnKey) -> bool:
        """Whether the user said which column it is."""
        return key in self._named

    def read(self, key: ColumnKey, parse: Callable[[object], _Value]) -> _Value | None:
        """The parsed value, or None: absent (a finding if the user named its column and it is no evidence), or unfit (a
        finding)."""
        if not self.has(key):
            if self.is_named(key) and key not in _EVIDENCE:
                self.fail(key, "column_missing", self._absence(key))
            return None
        try:
            return parse(self._row[self.column(key)])
        except ValueError as error:
            self.fail(key, "unfit_value", str(error))
            return None

    def require(self, key: ColumnKey, parse: Callable[[object], _Value]) -> _Value | None:
        """As `read`; an absent value is a finding."""
        if self.has(key) or self.is_named(key):
            return self.read(key, parse)
        self.fail(key, "column_missing", self._absence(key))
        return None

    def fail(self, key: ColumnKey, code: str, detail: str, positions: tuple[int, ...] = ()) -> None:
        """Note that the row cannot be used as it is."""
        self.note(
            key,
            CheckFinding(
                check=Check.STRUCTURE, severity=CheckSeverity.FAIL, code=code, detail=detail, positions=positions
            ),
        )

    def incomplete(self, key: EvidenceKey, code: str, detail: str) -> None:
        """Note that something cannot be checked."""
        self.note(key, CheckFinding(check=Check.EVIDENCE, severity=CheckSeverity.INCOMPLETE, code=code, detail=detail))

    def absent(self, key: EvidenceKey, consequence: str = "") -> None:
        """Note that evidence is not there, and what follows."""
        self.incomplete(key, f"{key}_missing", self._absence(key) + consequence)

    def note(self, key: ColumnKey, finding: CheckFinding) -> None:
        """Note a finding of a check."""
        self.findings.append(RowFinding(row=self.number, place=self.place, column=self.column(key), finding=finding))

    def _absence(self, key: ColumnKey) -> str:
        found = ", ".join(sorted(self._row)) or "none"
        return f"got no value; found the columns {found}. Where it has another name, say so: --columns {key}=NAME"
