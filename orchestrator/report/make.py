"""Makes `report.html`: at the end of each run, and by `concord report RUN`."""

from pathlib import Path
from typing import NamedTuple

from orchestrator.report.page import html_of
from orchestrator.report.record import read_record
from orchestrator.report.sections import page_of
from orchestrator.run_dir.layout import RunDir, write_atomic
from rollout.errors import UserError


class Report(NamedTuple):
    """A page that was written."""

    path: Path
    notes: tuple[str, ...]
    """What it lacks, and why."""


def make_report(path: Path) -> Report:
    """Write the report of the run in `path`, whole or not at all.

    Raises:
        UserError: it is no run directory, or another version of Concord wrote it, or the page cannot be written.
    """
    run = RunDir(path.absolute())
    record = read_record(path)
    html = html_of(page_of(record))
    try:
        write_atomic(run.report, html)
    except OSError as cause:
        raise UserError(
            f"cannot write {run.report}: {cause.strerror}; make the run directory writable, with 6 MB of free space"
        ) from cause
    return Report(run.report, record.notes)
