"""One row of a dump as it is read: its cells by key, and what was wrong with them. It must never know layouts or
models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from trainer.consistency.dump.columns import EVIDENCE, ColumnKey, DumpSettings, EvidenceKey
from trainer.consistency.dump.values import CellType
from trainer.types.evidence import Check, CheckFinding

_Value = TypeVar("_Value")


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
        return any(each.finding.failed for each in self.findings)

    def has(self, key: ColumnKey) -> bool:
        """Whether the row has a value for it."""
        return self._columns.name(key) in self._row

    def is_named(self, key: ColumnKey) -> bool:
        """Whether the user said which column it is."""
        return key in self._named

    def read(self, key: ColumnKey, kind: CellType[_Value], *, required: bool = False) -> _Value | None:
        """The value, or None: absent (a finding if it is required, or if the user named its column and it is no
        evidence), or unfit (a finding)."""
        if not self.has(key):
            if required or (self.is_named(key) and key not in EVIDENCE):
                self.fail(key, "column_missing", self._absence(key))
            return None
        try:
            return kind.read(self._row[self._columns.name(key)])
        except ValueError as error:
            self.fail(key, "unfit_value", str(error))
            return None

    def fail(self, key: ColumnKey, code: str, detail: str, positions: tuple[int, ...] = ()) -> None:
        """Note that the row cannot be used as it is."""
        self.note(key, CheckFinding.failure(Check.STRUCTURE, code, detail, positions))

    def absent(self, key: EvidenceKey, consequence: str = "") -> None:
        """Note that evidence is not there, and what follows."""
        self.note(key, CheckFinding.open_question(f"{key}_missing", self._absence(key) + consequence))

    def note(self, key: ColumnKey, finding: CheckFinding) -> None:
        """Note a finding of a check."""
        column = self._columns.name(key)
        self.findings.append(RowFinding(row=self.number, place=self.place, column=column, finding=finding))

    def _absence(self, key: ColumnKey) -> str:
        found = ", ".join(sorted(self._row)) or "none"
        return f"got no value; found the columns {found}. Where it has another name, say so: --columns {key}=NAME"
