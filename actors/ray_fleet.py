"""All actors of a run on a Ray cluster. Implements `actors.ports.Fleet`."""

import asyncio
import contextlib
import os
from collections.abc import Coroutine, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.calls import call, kill
from actors.places import Place, here
from actors.roles.consistency_service import ConsistencyActor, RayAuditor
from actors.roles.engine_actor import MAX_CONCURRENT_CALLS, EngineActor, RayEnginePort
from actors.roles.episode_actor import EpisodeActor, RayWorkerPort
from actors.roles.evaluation_actor import EvaluationActor, RayEvaluator
from actors.roles.reward_actor import RewardActor
from actors.roles.store_actor import RemoteStore, StoreActor
from actors.roles.trainer_actor import RayTrainer, TrainerActor
from actors.spec import FleetSpec
from actors.stacks import dump_stacks_here
from rollout.errors import ConcordError

STOP_DEADLINE_S = 5.0
REMOTE_STACKS_S = 20.0
"""How long the stacks of another machine may take; a process has to start there first."""
_DUMP_STACKS: Any = ray.remote(dump_stacks_here)


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
        self.trainer = RayTrainer(self._new_ranks(), self._store_handle, spec.store_deadline_s)
        self._engines: dict[int, RayEnginePort] = {}
        self._workers: dict[int, RayWorkerPort] = {}
        self._auditors: dict[int, RayAuditor] = {}
        self._evaluator: RayEvaluator | None = None
        self._first_evaluator: Any = (
            EvaluationActor.options(**self._small).remote(spec) if spec.evaluation.every_steps else None
        )
        self._places: dict[str, tuple[Any, Place]] = {}

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
        """Store, rewards and trainer ranks answer. Raises what one of them failed with."""
        await call(self._store_handle.place.remote(), "the store")
        for index, handle in enumerate(self._rewards):
            await call(handle.place.remote(), f"reward worker {index}")
        await self.trainer.ready()

    async def new_engine(self, slot: int) -> RayEnginePort:
        """A new incarnation of a slot; the one before must have been killed."""
        config = self._spec.engine
        options: dict[str, Any] = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus, "max_restarts": 0}
        options["max_concurrency"] = MAX_CONCURRENT_CALLS
        handle = EngineActor.options(**options).remote(self._spec, slot)
        self._engines[slot] = RayEnginePort(handle, slot)
        return self._engines[slot]

    async def new_worker(self, index: int) -> RayWorkerPort:
        """A new incarnation of an episode worker, with the reward workers that are its own."""
        mine = self._rewards[index :: self._spec.episodes.workers]
        options = self._small | {"max_concurrency": MAX_CONCURRENT_CALLS}
        handle: Any = EpisodeActor.options(**options).remote(self._spec, index, self._store_handle, mine)
        self._workers[index] = RayWorkerPort(handle, index)
        await self._workers[index].ready()
        return self._workers[index]

    async def new_auditor(self, index: int) -> RayAuditor:
        """A new incarnation of a consistency service actor."""
        config = self._spec.consistency
        handle: Any = ConsistencyActor.options(
            num_cpus=config.num_cpus, num_gpus=config.num_gpus, max_restarts=0
        ).remote(self._spec, index)
        self._auditors[index] = RayAuditor(handle, self._store_handle, index)
        await self._auditors[index].ready()
        return self._auditors[index]

    async def new_evaluator(self) -> RayEvaluator:
        """A new incarnation of the evaluation actor; the first starts together with the fleet.

        One that never starts is no part of the fleet: nobody waits for its process id.
        """
        handle: Any = self._first_evaluator or EvaluationActor.options(**self._small).remote(self._spec)
        self._first_evaluator = None
        evaluator = RayEvaluator(handle)
        await evaluator.ready()
        self._evaluator = evaluator
        return evaluator

    async def processes(self) -> Mapping[str, int]:
        """Process id by actor name, of the driver and the actors on its machine; asked once an incarnation."""
        new = {n: handle for n, handle in self._handles().items() if self._places.get(n, (None,))[0] is not handle}
        await asyncio.gather(*(self._ask_place(name, handle) for name, handle in new.items()))
        return {"driver": os.getpid(), **self._pids_by_node().get(here().node, {})}

    def _handles(self) -> dict[str, Any]:
        """Every actor of the fleet by its name."""
        handles: dict[str, Any] = {"store": self._store_handle}
        handles |= {f"reward-{i}": h for i, h in enumerate(self._rewards)}
        handles |= {f"trainer-{i}": h for i, h in enumerate(self.trainer.ranks)}
        handles |= {f"engine-{slot}": port.handle for slot, port in self._engines.items()}
        handles |= {f"episodes-{index}": port.handle for index, port in self._workers.items()}
        handles |= {f"consistency-{index}": port.handle for index, port in self._auditors.items()}
        return handles | ({"evaluation": self._evaluator.handle} if self._evaluator is not None else {})

    async def _ask_place(self, name: str, handle: Any) -> None:
        try:
            self._places[name] = (handle, await call(handle.place.remote(), name))
        except ConcordError:  # it is gone, or never came up: whoever started it hears of that
            self._places.pop(name, None)

    def _pids_by_node(self) -> dict[str, dict[str, int]]:
        """Process ids by actor name, a machine apart."""
        nodes: dict[str, dict[str, int]] = {}
        for name, (_, place) in self._places.items():
            nodes.setdefault(place.node, {})[name] = place.pid
        return nodes

    async def dump_stacks(self) -> str:
        """What every actor is doing, or why it does not say; on each machine asked by a process of that machine."""
        stacks = dict.fromkeys(self._handles(), "no stacks: its process is not known yet")
        for answer in await asyncio.gather(*(self._stacks_of(*node) for node in self._pids_by_node().items())):
            stacks |= answer
        return "\n".join(f"== {name}\n{text}" for name, text in sorted(stacks.items()))

    async def _stacks_of(self, node: str, pids: Mapping[str, int]) -> Mapping[str, str]:
        run_dir = self._spec.run_dir
        if node == here().node:
            return await asyncio.to_thread(dump_stacks_here, pids, run_dir)
        on_node = _DUMP_STACKS.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), max_retries=0
        )
        try:
            async with asyncio.timeout(REMOTE_STACKS_S):
                return await call(on_node.remote(pids, run_dir), f"machine {node}")
        except (ConcordError, TimeoutError) as error:
            reason = str(error) or f"no answer within {REMOTE_STACKS_S:g} s"
            return dict.fromkeys(pids, f"no stacks: its machine {node} does not say: {reason}")

    async def close(self) -> None:
        """Stop engines in order, then end every actor."""
        async with asyncio.TaskGroup() as group:
            for port in self._engines.values():
                group.create_task(self._stop(port))
        for name, handle in [*self._handles().items(), ("evaluation", self._first_evaluator)]:
            if name != "store" and handle is not None:
                kill(handle)
        await _in_order(self.store.close())
        kill(self._store_handle)

    async def _stop(self, port: RayEnginePort) -> None:
        await _in_order(call(port.handle.stop.remote(), port.name))
        await port.kill()


async def _in_order(end: Coroutine[Any, Any, object]) -> None:
    """Give an actor the time to end by itself; one that fails or takes longer is killed anyway."""
    with contextlib.suppress(ConcordError, TimeoutError):
        async with asyncio.timeout(STOP_DEADLINE_S):
            await end
