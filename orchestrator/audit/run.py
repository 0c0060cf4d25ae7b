"""`concord audit`: the consistency checks on a dump from any framework. Reads the file, runs the audit, shows what came
out.

options -> settings -> model -> rows, one by one -> report -> table or JSON -> exit status
"""

from collections.abc import Iterator
from itertools import islice

import typer

from orchestrator.audit.document import audit_document, document_json
from orchestrator.audit.options import AuditOptions
from orchestrator.audit.table import show_audit
from rollout.environments.row_files import PlacedRow, read_rows
from rollout.errors import UserError
from trainer.consistency.dump.columns import SamplingKey, dump_settings
from trainer.consistency.dump.reader import DumpReader, DumpRow
from trainer.consistency.dump.report import AuditResult


def audit_file(options: AuditOptions) -> int:
    """Audit a dump and show the report; 0 for a pass, else 1.

    Raises:
        UserError: the file, an option or the model cannot be used at all. What is wrong with a single row is in the
            report.
    """
    sampling: dict[SamplingKey, float | None] = {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
    }
    settings = dump_settings(options.layout, options.columns or [], sampling, options.engine_dtype or options.dtype)
    placed = read_rows(options.file, "FILE")
    from trainer.consistency.dump.audit import open_audit

    audit = open_audit(options.model, options.weights, settings, options.dtype)
    rows = list(_read(audit.reader, islice(placed, options.limit)))
    if not rows:
        raise UserError(f"{options.file} holds no rows; give a dump with at least one")
    more = next(placed, None) is not None
    document = audit_document(options, settings, audit.audit(rows), more)
    if options.as_json:
        typer.echo(document_json(document))
    else:
        show_audit(document)
    return 0 if document["result"] == AuditResult.PASS else 1


def _read(reader: DumpReader, placed: Iterator[PlacedRow]) -> Iterator[DumpRow]:
    for number, (place, row) in enumerate(placed):
        yield reader.read(number, place, row)
