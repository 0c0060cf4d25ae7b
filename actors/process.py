"""What every actor process does first: check the packages, and be able to show its stacks. Ray-free."""

import faulthandler
import signal
from pathlib import Path

from actors.preflight import check_packages
from actors.stacks import stacks_file

_stack_files: list[object] = []


def enter_process(name: str, run_dir: Path) -> None:
    """Call once at the start of an actor process; SIGUSR1 then writes its stacks to `run_dir/stacks/NAME.txt`.

    Raises:
        UserError: one of Concord's packages comes from elsewhere.
    """
    check_packages()
    path = stacks_file(run_dir, name)
    path.parent.mkdir(exist_ok=True)
    file = path.open("w")
    _stack_files.append(file)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True, chain=False)
