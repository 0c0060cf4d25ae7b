"""Faults that act on what is asked and answered: requests that change or wait on their way in, chunks that change on
their way out. They know no weights."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollout.errors import EngineError, UserError, boundary
from rollout.faults.config import AnswerFault, SlowReplicaFault
from rollout.faults.draws import selected
from rollout.faults.engines.engine import EngineWrapper
from rollout.published.number_formats import rounded_to_bf16
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.generation import GenerationRequest, TokenChunk
from rollout.types.protocols import Engine
from rollout.types.trajectory import RoutingTrace
from rollout.types.weights import PolicyVersion

RequestChange = Callable[[GenerationRequest], GenerationRequest]
ChunkChange = Callable[[TokenChunk], TokenChunk]


class ChangedAnswers(EngineWrapper):
    """Requests that are drawn, and that come while the replica serves the fault's start version or a later one, reach
    the engine changed; so do chunks of drawn requests that were sampled under such a version on their way back."""

    def __init__(
        self,
        inner: Engine,
        fault: AnswerFault | SlowReplicaFault,
        seed: int,
        *,
        request: RequestChange | None = None,
        chunk: ChunkChange | None = None,
    ) -> None:
        super().__init__(inner)
        self._fault, self._seed, self._request_change, self._chunk_change = fault, seed, request, chunk

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        return self._answer(request, None)

    def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        return self._answer(request, produced)

    async def asked(self, request: GenerationRequest) -> GenerationRequest:
        """What reaches the engine in place of `request`."""
        return self._request_change(request) if self._request_change else request

    async def answered(self, chunk: TokenChunk, ids: NDArray[np.int32]) -> TokenChunk:
        """What comes back in place of `chunk`; `ids` [T] are those of its sample up to its end, prompt included."""
        return self._chunk_change(chunk) if self._chunk_change else chunk

    async def _answer(
        self, request: GenerationRequest, produced: NDArray[np.int32] | None
    ) -> AsyncIterator[TokenChunk]:
        drawn, start = selected(self._fault, self._seed, request.request_id), self._fault.start_version
        if drawn and self.version >= start:
            request = await self.asked(request)
        answer = self.inner.generate(request) if produced is None else self.inner.resume_from(request, produced)
        given = request.prompt_ids if produced is None else np.concatenate([request.prompt_ids, produced])
        held: dict[int, NDArray[np.int32]] = {}
        async with _closing(answer) as chunks:
            async for chunk in chunks:
                ids = held[chunk.sample_index] = np.concatenate([held.get(chunk.sample_index, given), chunk.token_ids])
                yield await self.answered(chunk, ids) if drawn and chunk.policy.version >= start else chunk


class SlowReplica(ChangedAnswers):
    """Requests wait before they are sampled."""

    def __init__(
        self,
        inner: Engine,
        fault: SlowReplicaFault,
        seed: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(inner, fault, seed)
        self._delay_s, self._sleep = fault.delay_s, sleep

    async def asked(self, request: GenerationRequest) -> GenerationRequest:
        await self._sleep(self._delay_s)
        return request


class RawLogprobs(ChangedAnswers):
    """Log-probs are those of `score`: raw on every engine. A chunk whose weights the replica has given up meanwhile
    stays as it was."""

    async def answered(self, chunk: TokenChunk, ids: NDArray[np.int32]) -> TokenChunk:
        updates = self.updates
        if not chunk.token_ids.size or chunk.policy != self.policy or updates % 2:
            return chunk
        logprobs = (await self.inner.score(ids))[-chunk.token_ids.size :].astype(np.float32)
        return replace(chunk, logprobs=logprobs) if updates == self.updates else chunk


@asynccontextmanager
async def _closing(chunks: AsyncIterator[TokenChunk]) -> AsyncGenerator[AsyncIterator[TokenChunk]]:
    """Whoever stops reading also ends the request underneath, at once."""
    try:
        yield chunks
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


def with_top_p(top_p: float) -> RequestChange:
    """Sample from the smallest set of tokens with this probability."""
    return lambda request: replace(request, sampling=replace(request.sampling, top_p=top_p))


def at_temperature(temperature: float) -> RequestChange:
    """Sample at this temperature."""
    return lambda request: replace(request, sampling=replace(request.sampling, temperature=temperature))


def with_one_seed(seed: int) -> RequestChange:
    """Draw every sample with this key."""
    return lambda request: replace(request, seeds=(seed,) * request.num_samples)


def retokenized(tokenizer: Tokenizer | None) -> RequestChange:
    """In later turns (request ids `ID:TURN:SAMPLE`), send the prefix through text: special tokens get lost, others may
    be cut anew.

    Raises:
        UserError: there is no tokenizer.
    """
    if tokenizer is None:
        raise UserError("fault retokenized_turn needs the tokenizer that turns text into ids; plant it with one")

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
