"""The trainer waits for its lease no longer than the deadline of a call to the store."""

import asyncio
from collections.abc import Iterator

import pytest
import ray

from actors.cluster import cluster
from actors.config import ClusterConfig
from actors.roles.trainer_actor import RayTrainer
from rollout.errors import DeadlineError
from rollout.types.weights import PolicyVersion
from trainer.types.step import StepRequest


@ray.remote(num_cpus=0)
class SilentStore:
    """A store that never answers."""

    async def call(self, name: str, *args: object) -> None:
        await asyncio.Event().wait()


@pytest.fixture
def ray_cluster() -> Iterator[None]:
    with cluster(ClusterConfig(), num_cpus=1, num_gpus=0):
        yield


@pytest.mark.usefixtures("ray_cluster")
def test_a_lease_that_does_not_come_ends_the_step_with_the_key_of_its_deadline():
    trainer = RayTrainer([], SilentStore.remote(), store_deadline_s=0.2)
    with pytest.raises(DeadlineError, match=r"lease groups.*deadlines\.store_s"):
        asyncio.run(trainer.step(1, ["d-0"], StepRequest(policy=PolicyVersion(1, 1), oldest_version=0)))
