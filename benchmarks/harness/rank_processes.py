"""Runs a benchmark's work on trainer ranks, each in a process of its own, and brings back what the first one
measured."""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config.trainer import TrainerConfig
from trainer.model.ranks import Ranks, join_ranks, leave_ranks

Work = Callable[..., dict[str, Any]]


def on_ranks(
    world: int, work: Work, *arguments: object, deadline_s: float = 3600.0, config: TrainerConfig | None = None
) -> dict[str, Any]:
    """`work(ranks, *arguments)` in `world` new processes; the answer of rank 0.

    Raises:
        RuntimeError: a rank failed or did not finish in time.
    """
    folder = Path(tempfile.mkdtemp(prefix="concord-ranks-"))
    context = multiprocessing.get_context("spawn")
    settings = (config or TrainerConfig()).model_copy(update={"ranks": world})
    processes = [
        context.Process(target=_run, args=(settings, rank, folder, work, arguments), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(deadline_s)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
    if codes != [0] * world:
        raise RuntimeError(f"ranks ended with {codes} (None: not within {deadline_s} s)")
    return json.loads((folder / "answer.json").read_text())


def _run(config: TrainerConfig, rank: int, folder: Path, work: Work, arguments: tuple[object, ...]) -> None:
    ranks: Ranks = join_ranks(config, rank, f"file://{folder / 'rendezvous'}")
    answer = work(ranks, *arguments)
    if rank == 0:
        (folder / "answer.json").write_text(json.dumps(answer))
    leave_ranks()
    os._exit(
        0
        # threads of torch that are still there at the interpreter's own end now and then abort a process whose work
        # is done
    )
