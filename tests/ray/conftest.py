"""Every process that a test starts is ended with it, whatever the test came to."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.loop.concord_process import ConcordProcess

Start = Callable[..., ConcordProcess]


@pytest.fixture
def concord(tmp_path: Path) -> Iterator[Start]:
    """Starts `concord ARGUMENTS` in `tmp_path`."""
    started: list[ConcordProcess] = []

    def start(*arguments: str | Path, environment: dict[str, str] | None = None) -> ConcordProcess:
        started.append(ConcordProcess(*arguments, folder=tmp_path, environment=environment))
        return started[-1]

    yield start
    for process in started:
        process.close()
