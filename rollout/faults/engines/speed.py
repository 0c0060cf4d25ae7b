"""A replica that is slower than it should be."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
from numpy.typing import NDArray

from rollout.faults.config import SlowReplicaFault
from rollout.faults.engines.engine import EngineWrapper
from rollout.types.generation import GenerationRequest, TokenChunk
from rollout.types.protocols import Engine


class SlowEngine(EngineWrapper):
    """Requests that come while the replica serves the start version or a later one wait before they are sampled."""

    def __init__(
        self, inner: Engine, fault: SlowReplicaFault, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        super().__init__(inner)
        self._fault, self._sleep = fault, sleep

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Sample, later."""
        return self._delayed(self.inner.generate(request))

    def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        """Continue, later."""
        return self._delayed(self.inner.resume_from(request, produced))

    async def _delayed(self, answer: AsyncIterator[TokenChunk]) -> AsyncIterator[TokenChunk]:
        if self.version >= self._fault.start_version:
            await self._sleep(self._fault.delay_s)
        async for chunk in answer:
            yield chunk
