"""The samples of one dispatch on their way through engine and environments, turn by turn.

It owns requests and their ids: deterministic in dispatch, turn and sample, so that a repeat can never start a second generation. The first turn is one request
for all samples; later turns are one request a sample, which sends exactly the ids that the sample holds. It must never know rewards or policies.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollout.dispatch import Dispatch, FailReason
from rollout.episode_failure import EpisodeFailure, failing_as
from rollout.episode_sample import GrowingSample
from rollout.errors import ConcordError, EngineError, EnvironmentFailure, boundary
from rollout.generation import GenerationRequest, SamplingParams, TokenChunk
from rollout.protocols import Engine, Env
from rollout.sampling_keys import sampling_key
from rollout.trajectory import EngineTag, FinishReason, Timings, Trajectory

_ABORT_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """What all episodes of a run share."""

    sampling: SamplingParams
    """`max_new_tokens` counts for one turn."""
    max_context: int
    """Tokens that the engine can hold, prompt included. Where less room than `max_new_tokens` is left, a request asks for what fits; a sample that
    uses it up has the finish reason `length`."""
    seed: int | None = None
    """The run's seed in deterministic mode: every sample then has its own sampling key. None leaves the draws to the engine."""
    decode: bool = True
    """Whether the reward looks at text (`rollout.rewards.registry.needs_text`); else completions are empty strings."""


class Episode:
    """Single use: `run`, then `trajectories`."""

    def __init__(self, dispatch: Dispatch, engine: Engine, envs: Sequence[Env], tag: EngineTag, eos_ids: tuple[int, ...], settings: EpisodeSettings) -> None:
        """Check the prompt.

        Raises:
            EpisodeFailure: the environments do not show one usable prompt, or it leaves no room in the context.
        """
        self._dispatch, self._engine, self._envs, self._tag, self._eos_ids, self._settings = dispatch, engine, envs, tag, eos_ids, settings
        self._started_at_s, self._started_s = time.time(), time.perf_counter()
        self._running: set[str] = set()
        """Requests that the engine may still be serving."""
        prompt_ids = self._shared_prompt()
        self._samples = [GrowingSample(prompt_ids) for _ in envs]

    async def run(self) -> None:
        """All turns of all samples; each goes on as soon as its own turn has ended. On any way out but success, what runs is aborted.

        Raises:
            EpisodeFailure: engine or environment failed.
        """
        request = self._request(f"{self._dispatch.dispatch_id}:0", self._samples[0], range(len(self._samples)), turn=0)
        try:
            async with asyncio.TaskGroup() as later_turns:
                async for index in self._turn(request, self._samples, turn=0):
                    later_turns.create_task(self._go_on(index))
        except BaseExceptionGroup as failures:
            raise _first_failure(failures) from failures
        finally:
            await self._abort_running()

    def trajectories(self) -> list[Trajectory]:
        """The finished samples, in order.

        Raises:
            ValueError: what the engine returned makes no valid trajectory.
        """
        return [self._trajectory(index, sample) for index, sample in enumerate(self._samples)]

    def _trajectory(self, index: int, sample: GrowingSample) -> Trajectory:
        assert sample.finish_reason is not None, "run() has seen every sample end"
        return Trajectory(
            trajectory_id=f"{self._dispatch.dispatch_id}-{index}",
            dispatch_id=self._dispatch.dispatch_id,
            prompt_id=self._dispatch.prompt.prompt_id,
            environment=self._envs[index].name,
            token_ids=sample.token_ids(),
            sampled=sample.sampled_mask(),
            rollout_logprobs=sample.logprobs(),
            version_spans=sample.spans(),
            turns=sample.turns,
            tag=self._tag,
            finish_reason=sample.finish_reason,
            timings=Timings(started_at_s=self._started_at_s, generation_s=sample.ended_at_s - self._started_s),
            routing=sample.routing(),
        )

    def _shared_prompt(self) -> NDArray[np.int32]:
        name, context = self._dispatch.prompt.prompt_id, self._settings.max_context
        with failing_as(FailReason.ENVIRONMENT, EnvironmentFailure, f"prompt {name}"):
            if len(self._envs) != self._dispatch.group_size:
                raise EnvironmentFailure(f"got {len(self._envs)} environments for a group of {self._dispatch.group_size}; expected one a sample")
            prompts = [env.prompt_ids() for env in self._envs]
            if any(ids is not prompts[0] and not np.array_equal(ids, prompts[0]) for ids in prompts):
                raise EnvironmentFailure("the environments of one group show different prompts; expected the same for all samples")
            _check_given(prompts[0], "a prompt")
        if prompts[0].size + 1 > context:
            got = f"prompt {name} has {prompts[0].size} tokens, but the context of {context} must hold one more"
            raise EpisodeFailure(FailReason.PROMPT_TOO_LONG, f"{got}; shorten the prompt or raise engine.max_model_len")
        return prompts[0]

    def _request(self, request_id: str, sample: GrowingSample, indices: Sequence[int], turn: int) -> GenerationRequest:
        """`sample` goes on, once for each of `indices` (places in the group)."""
        settings, prompt = self._settings, self._dispatch.prompt
        room = settings.max_context - sample.length
        sampling = settings.sampling if room >= settings.sampling.max_new_tokens else replace(settings.sampling, max_new_tokens=room)
        seeds = () if settings.seed is None else tuple(sampling_key(settings.seed, prompt.pass_index, prompt.prompt_id, index, turn) for index in indices)
        ids, count = sample.token_ids(), len(indices)
        return GenerationRequest(request_id=request_id, prompt_ids=ids, num_samples=count, sampling=sampling, eos_ids=self._eos_ids, seeds=seeds)

    async def _turn(self, request: GenerationRequest, samples: Sequence[GrowingSample], turn: int) -> AsyncIterator[int]:
        """Serve one request; yields the place in `samples` of each sample whose turn ends."""
        context = f"request {request.request_id} on replica {self._tag.replica}"
        async for chunk in self._chunks(request, context):
            with failing_as(FailReason.ENGINE, EngineError, context):
                if chunk.request_id != request.request_id or not 0 <= chunk.sample_index < len(samples):
                    raise EngineError(f"got sample {chunk.sample_index} of request {chunk.request_id}; expected samples 0 to {len(samples) - 1} of its own")
                sample = samples[chunk.sample_index]
                ended = sample.add(chunk, request, turn)
            if ended:
                sample.ended_at_s = time.perf_counter()
                yield chunk.sample_index
        unfinished = [index for index, sample in enumerate(samples) if sample.turns <= turn]
        if unfinished:
            got = f"the answer ended without a finish reason for samples {unfinished} of {len(samples)}"
            raise EpisodeFailure(FailReason.ENGINE, f"{context}: {got}; expected all to finish")

    async def _chunks(self, request: GenerationRequest, context: str) -> AsyncIterator[TokenChunk]:
        """What the engine answers. A request that the engine itself failed is no longer ours to abort: its id may belong to an episode that was first."""
        self._running.add(request.request_id)
        stream = self._engine.generate(request)
        while True:
            try:
                with failing_as(FailReason.ENGINE, EngineError, context):
                    chunk = await anext(stream, None)
            except EpisodeFailure:
                self._running.discard(request.request_id)
                raise
            if chunk is None:
                self._running.discard(request.request_id)
                return
            yield chunk

    async def _go_on(self, index: int) -> None:
        """The later turns of one sample: as long as it stops by itself, its environment replies, and the context has room."""
        sample = self._samples[index]
        while sample.finish_reason is FinishReason.STOP:
            reply = await self._reply(index, sample)
            if reply is None:
                return
            if sample.length + reply.size + 1 > self._settings.max_context:
                sample.cut_off()
                return
            sample.give(reply)
            turn = sample.turns
            request = self._request(f"{self._dispatch.dispatch_id}:{turn}:{index}", sample, (index,), turn)
            async for _ in self._turn(request, (sample,), turn):
                pass

    async def _reply(self, index: int, sample: GrowingSample) -> NDArray[np.int32] | None:
        env = self._envs[index]
        with failing_as(FailReason.ENVIRONMENT, EnvironmentFailure, f"environment {env.name}, sample {index} of dispatch {self._dispatch.dispatch_id}"):
            reply = await env.reply(sample.turn_ids())
            if reply is not None:
                _check_given(reply, "a reply")
            return reply

    async def _abort_running(self) -> None:
        """Best effort: the error that brought us here is the one to report, and an engine that cannot abort is found out by its health check."""
        for request_id in self._running:
            with suppress(ConcordError), boundary(EngineError, f"abort of {request_id}"):
                async with asyncio.timeout(_ABORT_DEADLINE_S):
                    await self._engine.abort(request_id)


def _check_given(token_ids: NDArray[np.int32], what: str) -> None:
    if token_ids.dtype != np.int32 or token_ids.ndim != 1 or token_ids.size == 0:
        raise EnvironmentFailure(f"got {what} of {token_ids.dtype} {token_ids.shape}; expected a non-empty int32 vector")


def _first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """A classified failure where there is one."""
    return next((failure for failure in failures.exceptions if isinstance(failure, EpisodeFailure)), failures.exceptions[0])
