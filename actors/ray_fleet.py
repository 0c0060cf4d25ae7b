"""All actors of a run on a Ray cluster. Implements `actors.ports.Fleet`."""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.calls import call, kill
from actors.roles.consistency_service import ConsistencyActor, RayAuditor
from actors.roles.engine_actor import MAX_CONCURRENT_CALLS, EngineActor, RayEnginePort
from actors.roles.episode_actor import EpisodeActor, RayWorkerPort
from actors.roles.evaluation_actor import EvaluationActor, RayEvaluator
from actors.roles.reward_actor import RewardActor
from actors.roles.store_actor import RemoteStore, StoreActor
from actors.roles.trainer_actor import RayTrainer, TrainerActor
from actors.spec import FleetSpec
from rollout.errors import ConcordError, ProcessLostError

STOP_DEADLINE_S = 5.0


class RayFleet:
    """Creates actors and hands out their ports; replacing them is the driver's decision."""

    def __init__(self, spec: FleetSpec) -> None:
        self._spec = spec
        small = spec.cluster.small_actor_cpus
        self._small: dict[str, Any] = {"num_cpus": small, "max_restarts": 0}
        self._store_handle: Any = StoreActor.options(**self._small).remote(spec.run_dir, spec.store)
        self.store = RemoteStore(self._store_handle)
        self._rewards: list[Any] = [
            RewardActor.options(num_cpus=small, max_restarts=-1).remote(spec, index)
            for index in range(spec.reward_workers.workers)
        ]
        self.trainer = RayTrainer(self._new_ranks(), self._store_handle)
        self._engines: dict[int, RayEnginePort] = {}
        self._workers: dict[int, RayWorkerPort] = {}
        self._auditors: dict[int, RayAuditor] = {}
        self._evaluator: RayEvaluator | None = None
        self._first_evaluator: Any = (
            EvaluationActor.options(**self._small).remote(spec) if spec.evaluation.every_steps else None
        )
        self._pids: dict[str, tuple[Any, int]] = {}

    def _new_ranks(self) -> list[Any]:
        config = self._spec.trainer
        rendezvous = self._spec.run_dir / ".trainer-rendezvous"
        rendezvous.unlink(missing_ok=True)
        options = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus, "max_restarts": 0}
        return [
            TrainerActor.options(**options).remote(self._spec, rank, f"file://{rendezvous}")
            for rank in range(config.ranks)
        ]

    async def ready(self) -> None:
        """Store, rewards and trainer ranks answer.

        Raises:
            ConcordError: what one of them failed with.
        """
        await call(self._store_handle.pid.remote(), "the store")
        for index, handle in enumerate(self._rewards):
            await call(handle.pid.remote(), f"reward worker {index}")
        await self.trainer.ready()

    async def new_engine(self, slot: int) -> RayEnginePort:
        """A new incarnation of a slot; the one before must have been killed."""
        config = self._spec.engine
        options: dict[str, Any] = {
            "num_cpus": config.num_cpus,
            "num_gpus": config.num_gpus,
            "max_restarts": 0,
            "max_concurrency": MAX_CONCURRENT_CALLS,
        }
        handle = EngineActor.options(**options).remote(self._spec, slot)
        self._engines[slot] = RayEnginePort(handle, slot)
        return self._engines[slot]

    async def new_worker(self, index: int) -> RayWorkerPort:
        """A new incarnation of an episode worker, with the reward workers that are its own."""
        mine = self._rewards[index :: self._spec.episodes.workers]
        options = self._small | {"max_concurrency": MAX_CONCURRENT_CALLS}
        handle: Any = EpisodeActor.options(**options).remote(self._spec, index, self._store_handle, mine)
        self._workers[index] = RayWorkerPort(handle, index)
        await call(handle.pid.remote(), f"episode worker {index}")
        return self._workers[index]

    async def new_auditor(self, index: int) -> RayAuditor:
        """A new incarnation of a consistency service actor."""
        config = self._spec.consistency
        handle: Any = ConsistencyActor.options(
            num_cpus=config.num_cpus, num_gpus=config.num_gpus, max_restarts=0
        ).remote(self._spec, index)
        self._auditors[index] = RayAuditor(handle, self._store_handle, index)
        await call(handle.pid.remote(), f"consistency service {index}")
        return self._auditors[index]

    async def new_evaluator(self) -> RayEvaluator:
        """A new incarnation of the evaluation actor; the first starts together with the fleet.

        One that never starts is no part of the fleet: nobody waits for its process id.
        """
        handle: Any = self._first_evaluator or EvaluationActor.options(**self._small).remote(self._spec)
        self._first_evaluator = None
        await call(handle.pid.remote(), "the evaluation")
        self._evaluator = RayEvaluator(handle)
        return self._evaluator

    async def processes(self) -> Mapping[str, int]:
        """Process id by actor name; asked once an incarnation."""
        handles: dict[str, Any] = {"store": self._store_handle}
        handles |= {f"reward-{i}": h for i, h in enumerate(self._rewards)}
        handles |= {f"trainer-{i}": h for i, h in enumerate(self.trainer.ranks)}
        handles |= {f"engine-{slot}": port.handle for slot, port in self._engines.items()}
        handles |= {f"episodes-{index}": port.handle for index, port in self._workers.items()}
        handles |= {f"consistency-{index}": port.handle for index, port in self._auditors.items()}
        handles |= {"evaluation": self._evaluator.handle} if self._evaluator is not None else {}
        new = {name: handle for name, handle in handles.items() if self._pids.get(name, (None, 0))[0] is not handle}
        await asyncio.gather(*(self._ask_pid(name, handle) for name, handle in new.items()))
        return {"driver": os.getpid(), **{name: pid for name, (_, pid) in self._pids.items()}}

    async def _ask_pid(self, name: str, handle: Any) -> None:
        try:
            self._pids[name] = (handle, await call(handle.pid.remote(), name))
        except ProcessLostError:
            self._pids.pop(name, None)

    async def dump_stacks(self) -> str:
        """Ask every actor on this machine to write its stacks, and read what they wrote."""
        for _, pid in self._pids.values():
            try:
                os.kill(pid, signal.SIGUSR1)
            except ProcessLookupError:
                continue
        await asyncio.sleep(0.5)
        return _read_stacks(self._spec.run_dir / "stacks")

    async def close(self) -> None:
        """Stop engines in order, then end every actor."""
        async with asyncio.TaskGroup() as group:
            for port in self._engines.values():
                group.create_task(self._stop(port))
        for handle in [
            *(p.handle for p in self._workers.values()),
            *(p.handle for p in self._auditors.values()),
            *self._rewards,
            *self.trainer.ranks,
        ]:
            kill(handle)
        for handle in (self._first_evaluator, None if self._evaluator is None else self._evaluator.handle):
            if handle is not None:
                kill(handle)
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self.store.close()
        except (ConcordError, TimeoutError):
            pass
        kill(self._store_handle)

    async def _stop(self, port: RayEnginePort) -> None:
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await call(port.handle.stop.remote(), "engine")
        except (ConcordError, TimeoutError):
            pass
        kill(port.handle)


def _read_stacks(directory: Path) -> str:
    return "\n".join(f"== {path.stem}\n{path.read_text()}" for path in sorted(directory.glob("*.txt")))
