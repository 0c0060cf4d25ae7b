"""A seeded fake engine: a sample occupies a slot for a drawn latency and returns drawn tokens. It needs numpy only.

It owns slots, pauses and version spans in the same way as a real engine: a sample that a weight update interrupts has
the share of its tokens that fits its elapsed time under the old version, and the rest under the new one. With latency 0
a request is answered within the call, without timers.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollout.config import ScriptedConfig
from rollout.engines.scripted.clock import Clock, LoopClock
from rollout.engines.scripted.samples import SampleScript, ScriptedRequest, ScriptedSample
from rollout.engines.serving.requests import refuse_running, refuse_several
from rollout.engines.serving.usage import Usage
from rollout.errors import EngineError
from rollout.published.digests import manifest_digest
from rollout.published.manifest import digest_directory
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, PauseMode, TokenChunk
from rollout.types.protocols import EngineLoad
from rollout.types.trajectory import EngineTag, FinishReason
from rollout.types.weights import ApplyReport, WeightManifest


class ScriptedEngine:
    """See the module."""

    def __init__(
        self, config: ScriptedConfig, identity: EngineIdentity, clock: Clock | None = None, shortest: int | None = None
    ) -> None:
        """Samples have `shortest` to `max_new_tokens` tokens, and the shorter ones end with an end token; None: all
        have `max_new_tokens`."""
        self._config, self._identity = config, identity
        self._clock: Clock = clock or LoopClock()
        self._script = SampleScript(config, identity, shortest)
        self._manifest: WeightManifest | None = None
        self._digest = ""
        self._requests: dict[str, ScriptedRequest] = {}
        self._waiting: deque[ScriptedSample] = deque()
        self._occupied: set[ScriptedSample] = set()
        self._paused_at_s: float | None = None
        self._pause_mode = PauseMode.RECOMPUTE
        self._draining: set[str] = set()
        self._drained: asyncio.Event = asyncio.Event()
        self._stopped = False
        self._usage = Usage(self._clock.now)

    async def start(self, manifest: WeightManifest) -> EngineTag:
        """Take the manifest's label; with files, read and hash them."""
        self._digest, self._manifest = await asyncio.to_thread(_received_digest, manifest), manifest
        return await self.tag()

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        return self._serve(request, 0)

    def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        """Continue one sample; `max_new_tokens` counts `produced`. The same key gives the same continuation."""
        refuse_several(request)
        return self._serve(request, produced.size)

    async def abort(self, request_id: str) -> None:
        record = self._requests.get(request_id)
        if record is None:
            return
        for sample in record.running:
            self._freeze(sample)
            self._finish(sample, FinishReason.ABORT)
        self._fill_slots(self._clock.now())

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The canary's log-probs for the canary, else drawn from the ids and the weights' digest."""
        canary = self._served().canary
        if np.array_equal(canary.token_ids, token_ids):
            return canary.logprobs.copy()
        digest = hashlib.blake2b(token_ids.tobytes() + self._digest.encode(), digest_size=8).digest()
        return self._script.score(int.from_bytes(digest, "little"), token_ids.size - 1)

    async def pause(self, mode: PauseMode) -> None:
        """Freeze running samples, or for DRAIN let all accepted requests finish. A second pause changes nothing."""
        if self._paused_at_s is not None:
            return
        self._pause_mode = mode
        self._paused_at_s = self._clock.now()
        if mode is PauseMode.DRAIN:
            self._draining = {request_id for request_id, record in self._requests.items() if record.running}
            self._drained.clear()
            if self._draining:
                await self._drained.wait()
            self._paused_at_s = self._clock.now()
            return
        for sample in self._occupied:
            self._freeze(sample)

    async def apply(self, manifest: WeightManifest) -> ApplyReport:
        """Take over the label after `apply_s`; with files, answer the digest of the files' bytes.

        Raises:
            EngineError: the engine is not paused, or the files cannot be read.
        """
        if self._paused_at_s is None or self._draining:
            raise EngineError(f"got weights {manifest.policy.key} while sampling; pause the engine first")
        if self._config.apply_s:
            await self._sleep(self._config.apply_s)
        self._digest, self._manifest = await asyncio.to_thread(_received_digest, manifest), manifest
        interrupted = len({s.request.request.request_id for s in self._occupied})
        return ApplyReport(
            policy=manifest.policy,
            digest=self._digest,
            pause_s=self._clock.now() - self._paused_at_s,
            interrupted=interrupted,
        )

    async def resume(self) -> None:
        if self._paused_at_s is None:
            return
        self._paused_at_s, now_s = None, self._clock.now()
        self._draining.clear()
        for sample in self._occupied:
            self._run(sample, now_s)
        self._fill_slots(now_s)

    async def tag(self) -> EngineTag:
        kv, digest = self._config.kv_across_versions, self._digest
        return self._identity.tag(
            "scripted", "1", dtype=self._config.dtype, kv_across_versions=kv, weights_digest=digest
        )

    async def healthy(self) -> bool:
        return self._manifest is not None and not self._stopped

    async def load(self) -> EngineLoad:
        """Samples in slots and waiting; time with a sample in a slot, pauses apart."""
        return replace(self._usage.load(), running=len(self._occupied) + len(self._waiting))

    async def stop(self) -> None:
        """Fail what runs and refuse what comes."""
        self._stopped = True
        for record in list(self._requests.values()):
            record.chunks.put_nowait([])
        self._drained.set()

    # --- serving -------------------------------------------------------------------------------------------------

    def _served(self) -> WeightManifest:
        if self._manifest is None or self._stopped:
            raise EngineError(f"scripted engine {self._identity.replica} is not running; call start first")
        return self._manifest

    @property
    def _frozen(self) -> bool:
        return self._paused_at_s is not None and self._pause_mode is not PauseMode.DRAIN

    async def _serve(self, request: GenerationRequest, first: int) -> AsyncIterator[TokenChunk]:
        policy = self._served().policy
        refuse_running(request, self._requests, self._identity.replica)
        record = self._script.begin(request, first)
        if self._paused_at_s is None and not self._config.latency_mean_s:
            for sample in record.samples:
                sample.sampled_until(sample.length, policy)
                self._usage.generated(sample.length - first)
                for chunk in self._script.chunks(sample, None):
                    yield chunk
            return
        self._requests[request.request_id] = record
        self._waiting.extend(record.samples)
        try:
            self._fill_slots(self._clock.now())
            for _ in record.samples:
                chunks = await record.chunks.get()
                if self._stopped:
                    raise EngineError(
                        f"request {request.request_id}: replica {self._identity.replica} was stopped while it ran"
                    )
                for chunk in chunks:
                    yield chunk
        finally:
            self._forget(record)

    # --- slots ---------------------------------------------------------------------------------------------------

    def _fill_slots(self, at_s: float) -> None:
        """Start waiting samples, in order, at `at_s` (a slot that fell free in the past starts the next sample
        then)."""
        if self._frozen:
            return
        held: list[ScriptedSample] = []
        while self._waiting and len(self._occupied) < self._config.slots:
            sample = self._waiting.popleft()
            if self._paused_at_s is not None and sample.request.request.request_id not in self._draining:
                held.append(sample)
                continue
            self._occupied.add(sample)
            self._run(sample, at_s)
        self._waiting.extendleft(reversed(held))

    def _run(self, sample: ScriptedSample, at_s: float) -> None:
        self._usage.began(1)
        sample.start(self._clock, at_s, self._complete)

    def _complete(self, sample: ScriptedSample, due_s: float) -> None:
        sample.sampled_until(sample.length, self._served().policy)
        self._finish(sample, None)
        self._fill_slots(due_s)

    def _freeze(self, sample: ScriptedSample) -> None:
        if sample.freeze(self._clock.now(), self._served().policy):
            self._usage.ended(1)

    def _finish(self, sample: ScriptedSample, finish: FinishReason | None) -> None:
        self._leave(sample)
        sample.end(self._served().policy)
        self._usage.generated(sample.done - sample.first)
        sample.request.chunks.put_nowait(self._script.chunks(sample, finish))
        if not sample.request.running:
            self._note_drained(sample.request)

    def _forget(self, record: ScriptedRequest) -> None:
        for sample in record.running:
            self._leave(sample)
        del self._requests[record.request.request_id]
        self._note_drained(record)
        if not self._stopped:
            self._fill_slots(self._clock.now())

    def _note_drained(self, record: ScriptedRequest) -> None:
        self._draining.discard(record.request.request_id)
        if not self._draining:
            self._drained.set()

    def _leave(self, sample: ScriptedSample) -> None:
        if sample.stop():
            self._usage.ended(1)
        if sample in self._occupied:
            self._occupied.remove(sample)
        elif sample in self._waiting:
            self._waiting.remove(sample)

    async def _sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._clock.call_at(self._clock.now() + seconds, woken.set)
        await woken.wait()


def _received_digest(manifest: WeightManifest) -> str:
    """Digest over the bytes in the manifest's directory; a manifest without bytes is taken at its word."""
    if not manifest.num_bytes:
        return manifest_digest(manifest.tensors)
    return manifest_digest(digest_directory(Path(manifest.location)))
