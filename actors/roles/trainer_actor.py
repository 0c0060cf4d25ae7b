"""Trainer ranks, an actor each, and their common port for the driver."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from actors.calls import call, kill
from actors.places import Place, here
from actors.process import enter_process
from actors.spec import FleetSpec
from rollout.tasks import within
from rollout.types.trajectory import StoredGroups
from rollout.types.weights import PolicyVersion, Transport, WeightManifest
from trainer.checkpointing.checkpoints import CheckpointState
from trainer.loss.loss_settings import LossSettings
from trainer.step.build import build_trainer
from trainer.types.step import StepReport, StepRequest


@ray.remote
class TrainerActor:
    """One rank. Every method but `open_transfer` is collective: all ranks get the same call."""

    def __init__(self, spec: FleetSpec, rank: int, init_method: str) -> None:
        enter_process(f"trainer-{rank}", spec.run_dir)
        self._spec, self._rank = spec, rank
        self._digest = ""
        self._trainer = build_trainer(
            model_dir=spec.model_dir,
            config=spec.trainer,
            weights=spec.weights,
            total_steps=spec.total_steps,
            seed=spec.seed,
            rank=rank,
            init_method=init_method,
            settings=LossSettings(correction=spec.consistency.correction, faults=spec.faults),
        )

    def place(self) -> Place:
        return here()

    def step(self, lease: StoredGroups, request: StepRequest) -> StepReport:
        report = self._trainer.step(lease, request)
        if self._rank != 0:
            return report
        return self._trainer.save_step(self._spec.run_dir / "saved_steps", lease, request, report)

    def publish(self, policy: PolicyVersion) -> WeightManifest | None:
        manifest = self._trainer.publish(policy, self._spec.run_dir / "weights" / policy.key)
        self._digest = manifest.digest if manifest else ""
        return manifest

    def open_transfer(
        self, manifest: WeightManifest, members: Sequence[tuple[int, int]], workers: int
    ) -> WeightManifest:
        """Only rank 0 is called."""
        nccl = self._spec.weights.transport == Transport.NCCL
        place = ray.util.get_node_ip_address() if nccl else str((self._spec.run_dir / ".transfer").resolve())
        return self._trainer.open_transfer(manifest, members, workers, place)

    def send(self, manifest: WeightManifest) -> None:
        self._trainer.send(manifest)

    def save(self, policy: PolicyVersion, directory: Path) -> None:
        state = CheckpointState(policy=policy, seed=self._spec.seed, weights_digest=self._digest)
        self._trainer.save_checkpoint(directory, state)

    def load(self, directory: Path) -> PolicyVersion:
        return self._trainer.load_checkpoint(directory).policy


class RayTrainer:
    """Implements `actors.ports.TrainerPort` over all ranks."""

    def __init__(self, ranks: Sequence[Any], store: Any, store_deadline_s: float) -> None:
        """Lease from `store`, an actor, within a deadline."""
        self.ranks = ranks
        self._store, self._store_deadline_s = store, store_deadline_s

    async def _all(self, refs: Sequence[Any]) -> Any:
        """Answers of all ranks; the first failure at once. Answers with rank 0's."""
        answers = await asyncio.gather(*(call(ref, f"trainer rank {rank}") for rank, ref in enumerate(refs)))
        return answers[0]

    async def ready(self) -> None:
        """Every rank has loaded its model."""
        await self._all([rank.place.remote() for rank in self.ranks])

    async def step(self, trainer_epoch: int, dispatch_ids: Sequence[str], request: StepRequest) -> StepReport:
        lease = self._store.call.remote("lease", trainer_epoch, dispatch_ids)
        # The groups go from the store to the ranks; here only their arrival is waited for.
        limit_s = self._store_deadline_s
        leased = asyncio.to_thread(ray.wait, [lease], timeout=limit_s + 1.0, fetch_local=False)
        await within(leased, limit_s, "deadlines.store_s", "the store to lease groups")
        return await self._all([rank.step.remote(lease, request) for rank in self.ranks])

    async def publish(self, policy: PolicyVersion) -> WeightManifest:
        return await self._all([rank.publish.remote(policy) for rank in self.ranks])

    async def open_transfer(
        self, manifest: WeightManifest, members: Sequence[tuple[int, int]], workers: int
    ) -> WeightManifest:
        return await call(self.ranks[0].open_transfer.remote(manifest, members, workers), "trainer rank 0")

    async def send(self, manifest: WeightManifest) -> None:
        await self._all([rank.send.remote(manifest) for rank in self.ranks])

    async def save(self, policy: PolicyVersion, directory: Path) -> None:
        await self._all([rank.save.remote(policy, directory) for rank in self.ranks])

    async def load(self, directory: Path) -> PolicyVersion:
        return await self._all([rank.load.remote(directory) for rank in self.ranks])

    async def kill(self) -> None:
        for rank in self.ranks:
            kill(rank)
