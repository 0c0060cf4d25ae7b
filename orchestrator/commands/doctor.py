"""`concord doctor`: look at a run once, or again and again while it goes on."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from orchestrator.doctor.diagnosis import diagnose
from orchestrator.doctor.tables import as_json, show
from orchestrator.run_dir.reader import RunReader

INTERVAL_S = 5.0
"""Between two looks at a run that goes on."""


def examine(path: Path, *, json_lines: bool, watch: bool, wait: Callable[[float], None] = time.sleep) -> None:
    """Print the diagnosis of a run; with `watch` again whenever it rests on more steps, finds other things, or the run
    has ended, one way or the other, which ends it.

    Raises:
        UserError: it is no run, or one that this version cannot read.
    """
    reader, console = RunReader(path), Console()
    before: tuple[str, bool] | None = None
    while True:
        record, partial = reader.read()
        ended = record.history.end is not None
        diagnosis = diagnose(record)
        document, seen = as_json(str(path), diagnosis, partial), (as_json(str(path), diagnosis, ()), ended)
        if seen != before:
            if json_lines:
                console.file.write(document + "\n")
                console.file.flush()
            else:
                if watch and console.is_terminal:
                    console.clear()
                show(console, str(path), diagnosis, partial)
            before = seen
        if not watch or ended:
            return
        wait(INTERVAL_S)
