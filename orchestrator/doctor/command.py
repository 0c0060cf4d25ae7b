"""`concord doctor`: look at a run once, or again and again while it goes on."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from orchestrator.doctor.diagnosis import diagnose
from orchestrator.doctor.show import as_json, show
from orchestrator.reading.reader import RunReader

INTERVAL_S = 5.0
"""Between two looks at a run that goes on."""


def examine(path: Path, *, json_lines: bool, watch: bool, wait: Callable[[float], None] = time.sleep) -> None:
    """Print the diagnosis of a run; with `watch` again whenever it changes, until the run has ended in order.

    Raises:
        UserError: it is no run, or one that this version cannot read.
    """
    reader, console = RunReader(path), Console()
    before = ""
    while True:
        ended = (path / "summary.json").exists()
        record, partial = reader.read()
        diagnosis = diagnose(record)
        document = as_json(str(path), diagnosis, partial)
        if document != before:
            if json_lines:
                console.file.write(document + "\n")
                console.file.flush()
            else:
                if watch and console.is_terminal:
                    console.clear()
                show(console, str(path), diagnosis, partial)
            before = document
        if not watch or ended:
            return
        wait(INTERVAL_S)
