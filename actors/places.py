"""Where a process runs: ids of processes mean something on their own machine only."""

import os
from dataclasses import dataclass

import ray

from rollout.types.wire import wired


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process of a Ray cluster."""

    pid: int
    node: str
    """Ray's id of its machine."""


def here() -> Place:
    """Where the calling process runs; it has joined a cluster."""
    return Place(pid=os.getpid(), node=ray.get_runtime_context().get_node_id())
