"""The in-process reference engine: Hugging Face causal LMs, batched KV-cached sampling, exact log-probs.

It owns the asynchronous side: requests, their queues and their ends. The decoding itself runs on one thread
(`thread`), so that the event loop stays free; there, `core` steps cohorts of rows.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from rollout.config import TorchEngineConfig
from rollout.engines.serving.requests import NOTHING, refuse_running, refuse_several
from rollout.engines.torch.core import DecodeCore, SampleDone
from rollout.engines.torch.thread import Command, DecodeThread
from rollout.errors import ConcordError, EngineError
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, PauseMode, TokenChunk
from rollout.types.protocols import EngineLoad
from rollout.types.trajectory import EngineTag
from rollout.types.weights import ApplyReport, WeightManifest

T = TypeVar("T")


class TorchEngine:
    """See the module."""

    def __init__(self, config: TorchEngineConfig, identity: EngineIdentity) -> None:
        self._config, self._identity = config, identity
        self._thread: DecodeThread | None = None
        self._core: DecodeCore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[list[TokenChunk] | ConcordError]] = {}
        self._pending: list[Command[None]] = []

    async def start(self, manifest: WeightManifest) -> EngineTag:
        """Build the model, load the weights, check the forward pass against the library's own."""
        if self._thread is not None:
            raise EngineError(f"torch engine {self._identity.replica} has been started before; build a new one")
        self._loop = asyncio.get_running_loop()
        build = partial(DecodeCore, self._config, self._identity, manifest)
        deterministic = self._identity.deterministic
        self._thread = DecodeThread(build, self._from_thread, self._config.threads, deterministic=deterministic)
        self._core = await asyncio.wrap_future(self._thread.ready)
        return await self.tag()

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        return self._serve(request, NOTHING)

    def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        """Continue one sample; `max_new_tokens` counts `produced`. The same key goes on with the same random
        numbers."""
        refuse_several(request)
        return self._serve(request, produced)

    async def abort(self, request_id: str) -> None:
        if request_id in self._queues:
            self._deliver(await self._call(lambda core: core.abort(request_id)))

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Raw log-probs of given tokens, also while paused."""
        return await self._call(lambda core: core.score(token_ids))

    async def pause(self, mode: PauseMode) -> None:
        """Stop at the next token boundary, or for DRAIN when accepted requests have finished."""
        await self._call(lambda core: core.pause(mode))
        await asyncio.wrap_future(self._running_thread().drained())

    async def apply(self, manifest: WeightManifest) -> ApplyReport:
        """Load new weights; see the protocol. After an error that left some parameters old, the engine is unhealthy."""
        try:
            return await self._call(lambda core: core.apply(manifest))
        except ConcordError as error:
            if self._running_core().broken is not None:
                for queue in self._queues.values():
                    queue.put_nowait(error)
            raise

    async def resume(self) -> None:
        await self._call(lambda core: core.resume())

    async def tag(self) -> EngineTag:
        return self._identity.tag(
            "torch",
            f"torch {torch.__version__}, transformers {transformers.__version__}",
            dtype=self._config.dtype,
            kv_across_versions=self._config.kv_across_versions,
            weights_digest=self._running_core().digest,
        )

    async def healthy(self) -> bool:
        """Whether the decode thread lives and its weights are whole."""
        return self._thread is not None and self._thread.alive and self._core is not None and self._core.broken is None

    async def load(self) -> EngineLoad:
        """Samples that have not ended, seconds spent in decode steps, tokens sampled."""
        core = self._running_core()
        return EngineLoad(
            running=core.num_samples, busy_s=self._running_thread().busy_s, generated_tokens=core.generated_tokens
        )

    async def stop(self) -> None:
        """End the decode thread; requests that still run fail."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)
            self._deliver([])

    # --- between the event loop and the thread --------------------------------------------------------------------

    def _running_thread(self) -> DecodeThread:
        return self._started(self._thread)

    def _running_core(self) -> DecodeCore:
        return self._started(self._core)

    def _started(self, part: T | None) -> T:
        if part is None:
            raise EngineError(f"torch engine {self._identity.replica} is not running; call start first")
        return part

    async def _call(self, act: Callable[[DecodeCore], T]) -> T:
        self._flush()
        return await asyncio.wrap_future(self._running_thread().call(act))

    async def _serve(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        self._running_core()
        refuse_running(request, self._queues, self._identity.replica)
        queue = self._queues[request.request_id] = asyncio.Queue()
        waiting = request.num_samples
        try:
            await asyncio.wrap_future(self._submit(request, produced))
            while waiting:
                item = await queue.get()
                if isinstance(item, ConcordError):
                    raise item
                waiting -= 1
                for chunk in item:
                    yield chunk
        finally:
            del self._queues[request.request_id]
            if waiting:
                self._flush()
                self._running_thread().call(lambda core: core.abort(request.request_id))

    def _submit(self, request: GenerationRequest, produced: NDArray[np.int32]) -> Future[None]:
        """Requests of one turn of the event loop go to the thread together, so that they share a prefill."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        command = Command(lambda core: core.submit(request, produced))
        self._pending.append(command)
        return command.future

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            self._running_thread().send(pending)

    def _from_thread(self, done: list[SampleDone]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, done)

    def _deliver(self, done: list[SampleDone]) -> None:
        """Hand ended samples to their requests; when the thread has ended, its failure to all that are left."""
        for sample in done:
            if sample.request_id in self._queues:
                self._queues[sample.request_id].put_nowait(sample.chunks)
        thread = self._thread
        if thread is not None and not done and not thread.alive:
            cause = thread.failure or "it was stopped"
            for request_id, queue in self._queues.items():
                queue.put_nowait(EngineError(f"request {request_id}: the torch engine ended: {cause}"))
