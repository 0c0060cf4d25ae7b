"""Processes of this machine show their stacks; who cannot is named, and a stranger is left alone."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support.paths import ROOT

from actors.stacks import ANSWER_S, dump_stacks_here

ENTERS = """
import signal, sys
from pathlib import Path
from actors.process import enter_process
enter_process(sys.argv[1], Path(sys.argv[2]))
def waits_in_here():
    print("up", flush=True)
    while True:
        signal.pause()
waits_in_here()
"""
STRANGER = "import signal; print('up', flush=True); signal.pause()"

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that is an actor `name` of the run in `tmp_path`, or runs other code; answers with its id."""
    children: list[subprocess.Popen[str]] = []

    def run(name: str, code: str = ENTERS) -> int:
        command = [sys.executable, "-c", code, name, str(tmp_path)]
        children.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        stdout = children[-1].stdout
        assert stdout is not None and stdout.readline() == "up\n"
        return children[-1].pid

    yield run
    for child in children:
        child.kill()
        child.communicate()


def test_each_process_shows_where_it_stands_each_time_anew(start: Start, tmp_path: Path):
    pids = {name: start(name) for name in ("engine-0", "store")}
    for _ in range(2):
        stacks = dump_stacks_here(pids, tmp_path)
        assert stacks.keys() == pids.keys()
        assert all(text.count("waits_in_here") == 1 for text in stacks.values())


def test_a_process_that_cannot_answer_is_named_and_holds_up_no_other(start: Start, tmp_path: Path):
    pids = {name: start(name) for name in ("engine-0", "trainer-0")}
    psutil.Process(pids["engine-0"]).suspend()
    stacks = dump_stacks_here(pids, tmp_path)
    assert stacks["engine-0"] == f"no stacks: its process did not answer within {ANSWER_S:g} s"
    assert "waits_in_here" in stacks["trainer-0"]


def test_a_stranger_with_the_id_of_a_process_that_is_gone_is_left_alone(start: Start, tmp_path: Path):
    gone, stranger = start("engine-0"), start("", STRANGER)
    psutil.Process(gone).send_signal(signal.SIGKILL)
    psutil.Process(gone).wait(10.0)
    stacks = dump_stacks_here({"engine-0": gone, "store": stranger}, tmp_path)
    assert stacks == dict.fromkeys(("engine-0", "store"), "no stacks: its process is gone")
    assert psutil.Process(stranger).is_running()
