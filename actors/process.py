"""What every actor process does first: check the packages, and be able to show its stacks. Ray-free."""

import faulthandler
import signal
from pathlib import Path

from actors.preflight import check_packages

_stack_files: list[object] = []


def enter_process(name: str, run_dir: Path) -> None:
    """Call once at the start of an actor process; SIGUSR1 then writes its stacks to `run_dir/stacks/NAME.txt`.

    Raises:
        UserError: one of Concord's packages comes from elsewhere.
    """
    check_packages()
    directory = run_dir / "stacks"
    directory.mkdir(exist_ok=True)
    file = (directory / f"{name}.txt").open("w")
    _stack_files.append(file)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
