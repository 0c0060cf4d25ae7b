"""The trainer's side of a weight update that travels from GPU to GPU. Decides when it sends; the trainer decides where
they meet.

Disk stays the way back from everything: a new incarnation starts from the published directory. A transfer that breaks
off ends the run, since the trainer and every replica in it may hang inside a collective; nothing falls back to disk
silently.
"""

from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

from actors.ports import TrainerPort
from orchestrator.config import RunConfig
from orchestrator.replicas.replica import Replica
from rollout.config import VllmConfig
from rollout.errors import ConcordError, WeightSyncError
from rollout.tasks import within
from rollout.types.weights import Transport, WeightManifest

T = TypeVar("T")


class Transfer(Protocol):
    """What a publication drives beside its replicas."""

    async def announce(self, manifest: WeightManifest, replicas: Sequence[Replica]) -> WeightManifest:
        """The manifest that `replicas` apply instead of the published one.

        Raises:
            WeightSyncError: the trainer cannot offer it.
        """
        ...

    async def send(self, manifest: WeightManifest) -> None:
        """Send what `announce` promised, while the replicas apply it; returns when the trainer has nothing more to do.

        Raises:
            WeightSyncError: the transfer broke off, or did not end in time.
        """
        ...


class GpuTransfer:
    """Implements `Transfer` over the trainer's ranks. With nccl both sides meet in the transfer; with ipc the trainer
    exports, then engines read."""

    def __init__(self, trainer: TrainerPort, workers: int, deadline_s: float) -> None:
        self._trainer = trainer
        self._workers = workers
        self._deadline_s = deadline_s

    async def announce(self, manifest: WeightManifest, replicas: Sequence[Replica]) -> WeightManifest:
        members = tuple(sorted((replica.slot, replica.incarnation) for replica in replicas))
        announced = await self._ask(self._trainer.open_transfer(manifest, members, self._workers), "prepare", manifest)
        if announced.transport is Transport.IPC:
            await self._ask(self._trainer.send(announced), "export", announced)
        return announced

    async def send(self, manifest: WeightManifest) -> None:
        if manifest.transport is not Transport.IPC:
            await self._ask(self._trainer.send(manifest), "send", manifest)

    async def _ask(self, answer: Awaitable[T], verb: str, manifest: WeightManifest) -> T:
        try:
            what = f"the trainer to {verb} {manifest.policy.key}"
            return await within(answer, self._deadline_s, "deadlines.update_s", what)
        except ConcordError as error:
            raise WeightSyncError(
                f"the trainer could not {verb} {manifest.policy.key} from GPU to GPU: {error}; resume the run, and if"
                ' it comes again set weights.transport = "disk"'
            ) from error


def build_transfer(config: RunConfig, trainer: TrainerPort) -> Transfer | None:
    """What `weights.transport` asks for; nothing for disk."""
    if config.weights.transport == Transport.DISK:
        return None
    workers = config.engine.tensor_parallel_size if isinstance(config.engine, VllmConfig) else 1
    return GpuTransfer(trainer, workers, config.deadlines.update_s)
