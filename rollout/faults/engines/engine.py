"""An engine that hands everything on: the base of planted faults, which override what they change. It knows no
fault."""

from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from rollout.types.generation import GenerationRequest, PauseMode, TokenChunk
from rollout.types.protocols import Engine, EngineLoad
from rollout.types.trajectory import EngineTag
from rollout.types.weights import ApplyReport, PolicyVersion, WeightManifest


class EngineWrapper:
    """Implements `rollout.types.protocols.Engine` over another engine, and notes which policy that one serves."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.policy: PolicyVersion | None = None
        """What the replica serves; None before its start."""
        self.updates = 0
        """One more at the beginning and at the end of each update: odd while weights change."""

    @property
    def version(self) -> int:
        """Version of the policy that it serves; -1 before the start."""
        return -1 if self.policy is None else self.policy.version

    async def start(self, manifest: WeightManifest) -> EngineTag:
        tag = await self.inner.start(manifest)
        self.policy = manifest.policy
        return self.declared(tag)

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        return self.inner.generate(request)

    def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        return self.inner.resume_from(request, produced)

    async def abort(self, request_id: str) -> None:
        await self.inner.abort(request_id)

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        return await self.inner.score(token_ids)

    async def pause(self, mode: PauseMode) -> None:
        await self.inner.pause(mode)

    async def apply(self, manifest: WeightManifest) -> ApplyReport:
        """Take over weights and label. A failed update leaves `updates` odd: what the engine then holds is not
        known."""
        self.updates += 1
        report = await self.inner.apply(manifest)
        self.policy = manifest.policy
        self.updates += 1
        return report

    async def resume(self) -> None:
        await self.inner.resume()

    async def tag(self) -> EngineTag:
        return self.declared(await self.inner.tag())

    async def healthy(self) -> bool:
        return await self.inner.healthy()

    async def load(self) -> EngineLoad:
        return await self.inner.load()

    async def stop(self) -> None:
        await self.inner.stop()

    def declared(self, tag: EngineTag) -> EngineTag:
        """What this engine says of itself, from what the inner one says."""
        return tag
