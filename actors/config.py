"""Config of the cluster. Ray-free; frozen; unknown keys are errors."""

from typing import Annotated

from pydantic import Field, PositiveFloat

from rollout.config import Section


class ClusterConfig(Section):
    """Where the actors run."""

    address: str | None = None
    """Address of a running Ray cluster; None starts one on this machine for the length of the run."""
    object_store_gib: PositiveFloat = 1.0
    """Shared memory of a cluster that Concord starts itself."""
    small_actor_cpus: Annotated[float, Field(ge=0)] = 0.0
    """Ray CPUs of each store, episode-worker and reward-worker actor."""
