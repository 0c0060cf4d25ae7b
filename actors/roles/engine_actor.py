"""An engine replica in an actor of its own; its port for the driver, and its stand-in for episode workers."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import ray
from numpy.typing import NDArray

from actors.calls import RayPort, call
from actors.places import Place, here
from actors.ports import EnginePort, Started, Updated
from actors.process import enter_process
from actors.roles.engine_metrics import serve_engine_metrics
from actors.spec import FleetSpec
from rollout.engines.registry import build_engine
from rollout.errors import ConcordError, EngineError, boundary
from rollout.faults.registry import plant_engine, planted_engine_config
from rollout.tokenization.agreement import identify
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.transport.mailbox import Inbox, Outbox
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, PauseMode, TokenChunk
from rollout.types.protocols import Engine, EngineLoad
from rollout.types.trajectory import EngineTag
from rollout.types.weights import ApplyReport, WeightManifest

MAX_CONCURRENT_CALLS = 4096

GenerationJob: TypeAlias = tuple[GenerationRequest, NDArray[np.int32] | None]
"""A request, and for a sample that goes on what it has produced."""
Chunks: TypeAlias = tuple[TokenChunk, ...]


@ray.remote
class EngineActor:
    """Serves one engine; all calls share its event loop."""

    def __init__(self, spec: FleetSpec, slot: int) -> None:
        enter_process(f"engine-{slot}", spec.run_dir)
        tokenizer = load_tokenizer(spec.model_dir)
        self._identity = identify(tokenizer)
        self._config, self._metrics_host = spec.engine, spec.metrics_host
        self._engine: Engine = build_engine(
            planted_engine_config(spec.engine, spec.faults, slot),
            EngineIdentity(
                replica=slot,
                seed=spec.seed,
                deterministic=spec.deterministic,
                sampling=spec.sampling,
                tokenizer_fingerprint=self._identity.fingerprint,
                chat_template_digest=tokenizer.chat_template_digest(),
            ),
        )
        self._engine = plant_engine(
            self._engine, spec.faults, slot, scratch=spec.run_dir / "faults", tokenizer=tokenizer
        )
        self._inbox: Inbox[GenerationJob, Chunks] = Inbox(self._generate)

    def place(self) -> Place:
        return here()

    async def start(self, manifest: WeightManifest) -> Started:
        with boundary(EngineError, "the engine did not start"):
            tag = await self._engine.start(manifest)
            return Started(
                tag=tag,
                canary_logprobs=await self._engine.score(manifest.canary.token_ids),
                tokenizer=self._identity,
                metrics_address=serve_engine_metrics(self._config, self._metrics_host),
            )

    async def submit(self, client: str, jobs: Sequence[tuple[int, GenerationJob]]) -> None:
        """Start requests of a client; their chunks wait for `collect`."""
        self._inbox.submit(client, jobs)

    async def collect(self, client: str) -> list[tuple[int, Chunks | ConcordError]]:
        """Requests of a client that have finished."""
        return await self._inbox.collect(client)

    async def _generate(self, job: GenerationJob) -> Chunks:
        request, produced = job
        with boundary(EngineError, f"request {request.request_id}"):
            chunks = self._engine.generate(request) if produced is None else self._engine.resume_from(request, produced)
            return tuple([chunk async for chunk in chunks])

    async def abort(self, request_id: str) -> None:
        await self._engine.abort(request_id)

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        with boundary(EngineError, "score"):
            return await self._engine.score(token_ids)

    async def update(self, manifest: WeightManifest, mode: PauseMode) -> Updated:
        """Pause, apply, resume, then the canary. After an error the engine stays paused: its replica is retired."""
        with boundary(EngineError, f"the engine did not take over {manifest.policy.key}"):
            await self._engine.pause(mode)
            paused_at = time.perf_counter()
            report: ApplyReport = await self._engine.apply(manifest)
            await self._engine.resume()
            report = replace(report, pause_s=max(report.pause_s, time.perf_counter() - paused_at))
            return Updated(report=report, canary_logprobs=await self._engine.score(manifest.canary.token_ids))

    async def healthy(self) -> bool:
        return await self._engine.healthy()

    async def load(self) -> EngineLoad:
        return await self._engine.load()

    async def tag(self) -> EngineTag:
        return await self._engine.tag()

    async def stop(self) -> None:
        await self._engine.stop()


class RayEnginePort(RayPort):
    """Implements `actors.ports.EnginePort` for one incarnation."""

    def __init__(self, handle: Any, slot: int) -> None:
        super().__init__(handle, f"engine replica {slot}")

    async def start(self, manifest: WeightManifest) -> Started:
        return await call(self.handle.start.remote(manifest), self.name)

    async def update(self, manifest: WeightManifest, mode: PauseMode) -> Updated:
        return await call(self.handle.update.remote(manifest, mode), self.name)

    async def healthy(self) -> bool:
        return await call(self.handle.healthy.remote(), self.name)

    async def load(self) -> EngineLoad:
        return await call(self.handle.load.remote(), self.name)


class RayEngineUser(RayPort):
    """The driver's end of an actor that asks engine replicas."""

    async def connect(self, slot: int, engine: EnginePort, tag: EngineTag) -> None:
        if not isinstance(engine, RayEnginePort):
            raise ConcordError(
                f"{self.name} got an engine port of type {type(engine).__name__}; expected one of this Ray cluster"
            )
        await call(self.handle.connect.remote(slot, engine.handle, tag), self.name)


class RemoteEngine:
    """Implements `rollout.types.protocols.Engine` inside an episode worker: requests travel together, whole turns come
    back."""

    def __init__(self, handle: Any, slot: int) -> None:
        self._handle = handle
        self._name = f"engine replica {slot}"
        client = uuid.uuid4().hex
        self._outbox: Outbox[GenerationJob, Chunks] = Outbox(
            lambda jobs: call(handle.submit.remote(client, jobs), self._name),
            lambda: call(handle.collect.remote(client), self._name),
        )

    async def start(self, manifest: WeightManifest) -> EngineTag:
        raise ConcordError(f"{self._name} is started by the driver, not by an episode worker")

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        for chunk in await self._outbox.ask((request, None)):
            yield chunk

    async def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        for chunk in await self._outbox.ask((request, produced)):
            yield chunk

    async def abort(self, request_id: str) -> None:
        await call(self._handle.abort.remote(request_id), self._name)

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return await call(self._handle.score.remote(token_ids), self._name)

    async def pause(self, mode: PauseMode) -> None:
        raise ConcordError(f"{self._name} is paused by the driver only")

    async def apply(self, manifest: WeightManifest) -> ApplyReport:
        raise ConcordError(f"{self._name} is updated by the driver only")

    async def resume(self) -> None:
        raise ConcordError(f"{self._name} is resumed by the driver only")

    async def tag(self) -> EngineTag:
        return await call(self._handle.tag.remote(), self._name)

    async def healthy(self) -> bool:
        return await call(self._handle.healthy.remote(), self._name)

    async def load(self) -> EngineLoad:
        return await call(self._handle.load.remote(), self._name)

    async def stop(self) -> None:
        raise ConcordError(f"{self._name} is stopped by the driver only")
