"""Faults that act on what is asked and answered: requests that change on their way in, chunks that change on their way
out. They know no weights."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollout.errors import EngineError, boundary
from rollout.faults.config import FaultSection
from rollout.faults.draws import selected
from rollout.faults.engines.engine import EngineWrapper, closing
from rollout.published.number_formats import rounded_to_bf16
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.generation import GenerationRequest, TokenChunk
from rollout.types.protocols import Engine
from rollout.types.trajectory import RoutingTrace
from rollout.types.weights import PolicyVersion

RequestChange = Callable[[GenerationRequest], GenerationRequest]
ChunkChange = Callable[[TokenChunk], TokenChunk]


class ChangedRequests(EngineWrapper):
    """Requests that are drawn, and that come while the replica serves the fault's start version or a later one, reach
    the engine changed."""

    def __init__(self, inner: Engine, fault: FaultSection, kind: str, seed: int, change: RequestChange) -> None:
        super().__init__(inner)
        self._fault, self._kind, self._seed, self._change = fault, kind, seed, change

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Sample what the changed request asks for."""
        return self.inner.generate(self._asked(request))

    def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        """Continue under the changed request."""
        return self.inner.resume_from(self._asked(request), produced)

    def _asked(self, request: GenerationRequest) -> GenerationRequest:
        acts = self.version >= self._fault.start_version and selected(
            self._fault, self._kind, self._seed, request.request_id
        )
        return self._change(request) if acts else request


class ChangedChunks(EngineWrapper):
    """Chunks of drawn requests that were sampled under the fault's start version or a later one come back changed."""

    def __init__(self, inner: Engine, fault: FaultSection, kind: str, seed: int, change: ChunkChange) -> None:
        super().__init__(inner)
        self._fault, self._kind, self._seed, self._change = fault, kind, seed, change

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Sample, and change the answer."""
        return self._changed(request.request_id, self.inner.generate(request))

    def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        """Continue, and change the answer."""
        return self._changed(request.request_id, self.inner.resume_from(request, produced))

    async def _changed(self, request_id: str, answer: AsyncIterator[TokenChunk]) -> AsyncIterator[TokenChunk]:
        drawn = selected(self._fault, self._kind, self._seed, request_id)
        async with closing(answer) as chunks:
            async for chunk in chunks:
                yield self._change(chunk) if drawn and chunk.policy.version >= self._fault.start_version else chunk


class RawLogprobs(EngineWrapper):
    """Log-probs are those of `score`: raw on every engine. A chunk whose weights the replica has given up meanwhile
    stays as it was."""

    def __init__(self, inner: Engine, fault: FaultSection, kind: str, seed: int) -> None:
        super().__init__(inner)
        self._fault, self._kind, self._seed = fault, kind, seed

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Sample, and score what was sampled."""
        return self._scored(request, request.prompt_ids, self.inner.generate(request))

    def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        """Continue, and score what was sampled."""
        return self._scored(
            request, np.concatenate([request.prompt_ids, produced]), self.inner.resume_from(request, produced)
        )

    async def _scored(
        self, request: GenerationRequest, given: NDArray[np.int32], answer: AsyncIterator[TokenChunk]
    ) -> AsyncIterator[TokenChunk]:
        drawn = selected(self._fault, self._kind, self._seed, request.request_id)
        held: dict[int, NDArray[np.int32]] = {}
        async with closing(answer) as chunks:
            async for chunk in chunks:
                before = held.get(chunk.sample_index, given)
                held[chunk.sample_index] = np.concatenate([before, chunk.token_ids])
                acts = drawn and chunk.token_ids.size and chunk.policy.version >= self._fault.start_version
                yield await self._raw(chunk, held[chunk.sample_index]) if acts else chunk

    async def _raw(self, chunk: TokenChunk, ids: NDArray[np.int32]) -> TokenChunk:
        updates = self.updates
        if chunk.policy != self.policy or updates % 2:
            return chunk
        logprobs = await self.inner.score(ids)
        return (
            replace(chunk, logprobs=logprobs[-chunk.token_ids.size :].astype(np.float32))
            if updates == self.updates
            else chunk
        )


def with_top_p(top_p: float) -> RequestChange:
    """Sample from the smallest set of tokens with this probability."""
    return lambda request: replace(request, sampling=replace(request.sampling, top_p=top_p))


def retokenized(tokenizer: Tokenizer) -> RequestChange:
    """In later turns (request ids `ID:TURN:SAMPLE`), send the prefix through text: special tokens get lost, others may
    be cut anew."""

    def change(request: GenerationRequest) -> GenerationRequest:
        if request.request_id.count(":") < 2:
            return request
        ids = tokenizer.encode(tokenizer.decode(request.prompt_ids, skip_special_tokens=True))
        return replace(request, prompt_ids=ids) if ids.size else request

    return change


def in_bf16(chunk: TokenChunk) -> TokenChunk:
    """Log-probs rounded to bfloat16."""
    return replace(chunk, logprobs=rounded_to_bf16(chunk.logprobs))


def one_short(chunk: TokenChunk) -> TokenChunk:
    """One log-prob too few: no chunk can be made of that, and the request fails as it does when a real engine answers
    so.

    Raises:
        EngineError: always, if there is a log-prob to lose.
    """
    with boundary(EngineError, f"request {chunk.request_id}, sample {chunk.sample_index}"):
        return replace(chunk, logprobs=chunk.logprobs[:-1])


def labelled_before(chunk: TokenChunk) -> TokenChunk:
    """The label of the version before; 0 stays 0, so that the label is a known one."""
    return replace(chunk, policy=PolicyVersion(chunk.policy.trainer_epoch, max(0, chunk.policy.version - 1)))


def without_routing(chunk: TokenChunk) -> TokenChunk:
    """No routing."""
    return replace(chunk, routing=None)


def with_half_routing(chunk: TokenChunk) -> TokenChunk:
    """Every second covered row of the routing is missing."""
    if chunk.routing is None:
        return chunk
    covered, experts = chunk.routing.covered.copy(), chunk.routing.experts.copy()
    covered[np.flatnonzero(covered)[1::2]] = False
    experts[~covered] = 0
    return replace(chunk, routing=RoutingTrace(experts=experts, covered=covered))
