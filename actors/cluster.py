"""Ray itself: start or join a cluster, and leave it without leftovers."""

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Generator
from typing import Any

import psutil
import ray

from actors.config import ClusterConfig
from rollout.errors import ConcordError, UserError, boundary

START_TRIES = 3
"""Ray gives its node 30 s to come up, a time that no setting lengthens; on a busy machine that is too short now and
then."""
GCS_WAIT_S = 120
"""How long Ray's control service may take until it listens; Ray itself would wait 30 s."""
DIRECT_BYTES = 2**20
"""Arguments and answers up to this size travel with their call; larger ones go through shared memory, which costs more
a call. (Ray's own cluster also runs its workers at niceness 15, behind everything else on the machine; ours run like
any other process.)"""


_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


@contextlib.contextmanager
def cluster(config: ClusterConfig, num_cpus: float, num_gpus: float) -> Generator[None]:
    """Join `config.address`, or run a cluster of our own with the planned resources for the length of the context.

    Its end ends what this process started meanwhile, and nothing that it had started before (a tracker's service still
    has to write).
    """
    before = psutil.Process().children()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(GCS_WAIT_S))
    _keep_stdout_clean()
    try:
        if config.address is None:
            come_up(lambda: _start(config, num_cpus, num_gpus), lambda: _clean(before))
        else:
            _join(config.address)
        yield
    finally:
        mine = _started_since(before)
        ray.shutdown()
        if config.address is None:
            _end(mine)


def come_up(start: Callable[[], None], clean: Callable[[], None]) -> None:
    """Start Ray, and start it again when it did not come up.

    Args:
        start: one try.
        clean: ends what a try that failed has left.

    Raises:
        UserError: it did not come up START_TRIES times, or refuses its arguments; with what to look at.
    """
    for tries in range(1, START_TRIES + 1):
        try:
            with boundary(ConcordError, "ray.init"):
                start()
        except ConcordError as error:
            clean()
            refused = isinstance(error.__cause__, ValueError)
            if refused or tries == START_TRIES:
                raise UserError(_why_not(str(error).splitlines()[0], tries)) from error
        else:
            return


def _why_not(error: str, tries: int) -> str:
    free_gib, load = psutil.virtual_memory().available / 2**30, os.getloadavg()[0]
    return (
        f"Ray did not start, tried {tries} times; the last time: {error} Here: load average {load:.1f} on "
        f"{psutil.cpu_count()} CPUs, {free_gib:.1f} GiB of memory free. Look at Ray's logs (raylet.out and "
        "gcs_server.out in /tmp/ray/session_latest/logs); then start again when the machine is less busy, free memory "
        "or lower cluster.object_store_gib, or start Ray yourself (ray start --head) and set cluster.address = 'auto'"
    )


def _join(address: str) -> None:
    cure = "check cluster.address, and that Ray runs there (ray status)"
    with _interruptible(), boundary(UserError, f"cannot join the Ray cluster at {address} ({cure})"):
        ray.init(address=address, **_QUIET)


def _start(config: ClusterConfig, num_cpus: float, num_gpus: float) -> None:
    with _interruptible():
        ray.init(
            address="local",
            num_cpus=max(1, round(num_cpus)),
            num_gpus=round(num_gpus) or None,
            include_dashboard=False,
            object_store_memory=int(config.object_store_gib * 2**30),
            _system_config={"max_direct_call_object_size": DIRECT_BYTES, "worker_niceness": 0},
            **_QUIET,
        )


def _clean(before: list[psutil.Process]) -> None:
    """End what a start that failed has left."""
    ray.shutdown()
    _end(_started_since(before), patience_s=0.0)


@contextlib.contextmanager
def _interruptible() -> Generator[None]:
    try:
        yield
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


def _end(processes: list[psutil.Process], patience_s: float = 3.0) -> None:
    """End what our own cluster started and has not ended by itself."""
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=2.0)
