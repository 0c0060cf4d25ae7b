"""GradLoc in a loop that is not this trainer's: the example finds its planted token, alone and on two ranks, and what
does not fit is refused."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.paths import ROOT

from rollout.errors import UserError
from trainer.gradloc import micro_batch, ranks_of

EXAMPLE = ROOT / "examples" / "gradloc_any_loop.py"


def outputs(tmp_path: Path, world: int) -> list[str]:
    """What each rank prints."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        "--redirects",
        "3",
        "--log-dir",
        str(tmp_path),
    ]
    command = [sys.executable, *(torchrun if world > 1 else []), str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=EXAMPLE.parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    return [path.read_text() for path in sorted(tmp_path.rglob("stdout.log"))] if world > 1 else [done.stdout]


@pytest.mark.parametrize("world", [1, 2])
def test_the_example_names_the_planted_token_and_nothing_else(tmp_path: Path, world: int):
    printed = outputs(tmp_path, world)
    assert len(printed) == world
    for rank, text in enumerate(printed):
        steps = text.splitlines()
        assert [line.partition(":")[0] for line in steps] == [f"rank {rank} step {step}" for step in range(8)]
        assert f"located: (GradLocHit(micro_batch=1, row=2, position=17, rank={world - 1}, " in steps.pop(6)
        assert not [line for line in steps if "GradLocHit" in line]


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 55


def test_a_process_without_a_group_is_told_what_to_call():
    with pytest.raises(UserError, match=r"call torch\.distributed\.init_process_group first"):
        ranks_of(torch.device("cpu"))


def test_rows_end_behind_their_last_term_and_keep_what_they_are_given():
    mask = np.array([[False, True, True, False], [False, False, False, False]])
    micro = micro_batch(np.arange(8).reshape(2, 4), mask, 0.5, names=("a", "b"))
    assert (micro.lengths, micro.trajectory_ids, micro.token_weights.tolist()) == ((3, 0), ("a", "b"), [0.5, 0.5])


def test_rows_that_do_not_fit_are_refused():
    ids, mask = np.zeros((2, 4), dtype=np.int64), np.array([[False, True, True, True]] * 2)
    with pytest.raises(UserError, match="expected those of token_ids"):
        micro_batch(ids, mask[:1], 1.0)
    with pytest.raises(UserError, match="expected those of token_ids"):
        micro_batch(ids, mask, 1.0, names=("a",))
    with pytest.raises(UserError, match="column 0, which nothing predicts"):
        micro_batch(ids, ~mask, 1.0)
