"""Ray itself: start or join a cluster, and leave it without leftovers."""

import contextlib
import importlib
import logging
import os
from collections.abc import Generator
from typing import Any

import psutil
import ray

from actors.config import ClusterConfig

DIRECT_BYTES = 2**20
"""Arguments and answers up to this size travel with their call; larger ones go through shared memory, which costs more
a call. (Ray's own cluster also runs its workers at niceness 15, behind everything else on the machine; ours run like
any other process.)"""


@contextlib.contextmanager
def cluster(config: ClusterConfig, num_cpus: float, num_gpus: float) -> Generator[None]:
    """Join `config.address`, or run a cluster of our own with the planned resources for the length of the context.

    Its end ends what this process started meanwhile, and nothing that it had started before (a tracker's service still
    has to write).
    """
    before = psutil.Process().children()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _keep_stdout_clean()
    try:
        _init(config, num_cpus, num_gpus)
        yield
    finally:
        mine = _started_since(before)
        ray.shutdown()
        if config.address is None:
            _end(mine)


def _init(config: ClusterConfig, num_cpus: float, num_gpus: float) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if config.address is not None:
            ray.init(address=config.address, **quiet)
            return
        ray.init(
            address="local",
            num_cpus=max(1, round(num_cpus)),
            num_gpus=round(num_gpus) or None,
            include_dashboard=False,
            object_store_memory=int(config.object_store_gib * 2**30),
            _system_config={"max_direct_call_object_size": DIRECT_BYTES, "worker_niceness": 0},
            **quiet,
        )
    except SystemExit as cause:  # what Ray makes of SIGTERM
        raise KeyboardInterrupt from cause


def _keep_stdout_clean() -> None:
    """Ray prints what it has to say of lost actors between the JSON lines of a run, whatever `log_to_driver` is; the
    events say it better."""
    worker: Any = importlib.import_module("ray._private.worker")
    worker._worker_logs_enabled = False


def _started_since(before: list[psutil.Process]) -> list[psutil.Process]:
    """All processes below this one, without those in `before` and what is below them."""
    roots = [process for process in psutil.Process().children() if process not in before]
    below: list[psutil.Process] = []
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            below += root.children(recursive=True)
    return roots + below


def _end(processes: list[psutil.Process]) -> None:
    """End what our own cluster started and has not ended by itself."""
    _, alive = psutil.wait_procs(processes, timeout=3.0)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=2.0)
