"""An engine that hands everything on; a test overrides what goes wrong."""

from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from rollout.types.generation import GenerationRequest, PauseMode, TokenChunk
from rollout.types.protocols import Engine, EngineLoad
from rollout.types.trajectory import EngineTag
from rollout.types.weights import ApplyReport, WeightManifest


class EngineWrap:
    """An engine that hands everything on: planted faults override what they change."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def start(self, manifest: WeightManifest) -> EngineTag:
        return await self.engine.start(manifest)

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        return self.engine.generate(request)

    def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        return self.engine.resume_from(request, produced)

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return await self.engine.score(token_ids)

    async def pause(self, mode: PauseMode) -> None:
        await self.engine.pause(mode)

    async def apply(self, manifest: WeightManifest) -> ApplyReport:
        return await self.engine.apply(manifest)

    async def resume(self) -> None:
        await self.engine.resume()

    async def tag(self) -> EngineTag:
        return await self.engine.tag()

    async def healthy(self) -> bool:
        return await self.engine.healthy()

    async def load(self) -> EngineLoad:
        return await self.engine.load()

    async def stop(self) -> None:
        await self.engine.stop()
