"""The samples of one dispatch on their way through engine and environments, turn by turn.

It owns requests and their ids: deterministic in dispatch, turn and sample, so that a repeat can never start a second
generation. The first turn is one request for all samples; later turns are one request a sample, which sends exactly the
ids that the sample holds. It must never know rewards or policies.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollout.environments.single_turn import SingleTurnEnv
from rollout.episodes.failure import EpisodeFailure, failing_as
from rollout.episodes.sample import BadAnswer, GrowingSample
from rollout.episodes.sampling_keys import sampling_key
from rollout.errors import ConcordError, EngineError, EnvironmentFailure, boundary
from rollout.types.dispatch import Dispatch, FailReason
from rollout.types.generation import GenerationRequest, SamplingParams
from rollout.types.protocols import Engine, Env
from rollout.types.trajectory import EngineTag, FinishReason, Timings, Trajectory

_ABORT_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSettings:
    """What all episodes of a run share."""

    sampling: SamplingParams
    """`max_new_tokens` counts for one turn."""
    max_context: int
    """Tokens that the engine can hold, prompt included. Where less room than `max_new_tokens` is left, a request asks
    for what fits; a sample that uses it up has the finish reason `length`."""
    seed: int | None = None
    """The run's seed in deterministic mode: every sample then has its own sampling key. None leaves the draws to the
    engine."""
    decode: bool = True
    """Whether the reward looks at text (`rollout.rewards.registry.needs_text`); else completions are empty strings."""


class Episode:
    """Single use: `run`, then `trajectories`."""

    def __init__(
        self,
        dispatch: Dispatch,
        engine: Engine,
        envs: Sequence[Env],
        tag: EngineTag,
        eos_ids: tuple[int, ...],
        settings: EpisodeSettings,
    ) -> None:
        """Check the prompt.

        Raises:
            EpisodeFailure: the environments do not show one usable prompt, or it leaves no room in the context.
        """
        self._dispatch, self._engine, self._envs = dispatch, engine, envs
        self._tag, self._eos_ids, self._settings = tag, eos_ids, settings
        self._started_at_s, self._started_s = time.time(), time.perf_counter()
        prompt_ids = self._shared_prompt()
        self._samples = [GrowingSample(prompt_ids) for _ in envs]

    async def run(self) -> None:
        """All turns of all samples; each goes on as soon as its own turn has ended. On any way out but success, what
        runs is aborted.

        Raises:
            EpisodeFailure: engine or environment failed.
        """
        request = self._request(f"{self._dispatch.dispatch_id}:0", self._samples[0], range(len(self._samples)), turn=0)
        if all(isinstance(env, SingleTurnEnv) for env in self._envs):
            await self._turn(request, self._samples, 0, None)
            return
        try:
            async with asyncio.TaskGroup() as later_turns:
                await self._turn(request, self._samples, 0, later_turns)
        except BaseExceptionGroup as failures:
            classified = [failure for failure in failures.exceptions if isinstance(failure, EpisodeFailure)]
            raise (classified or failures.exceptions)[0] from failures

    def trajectories(self) -> list[Trajectory]:
        """The finished samples, in order.

        Raises:
            ValueError: what the engine returned makes no valid trajectory.
        """
        return [self._trajectory(index, sample) for index, sample in enumerate(self._samples)]

    def _trajectory(self, index: int, sample: GrowingSample) -> Trajectory:
        assert sample.finish_reason is not None, "run() has seen every sample end"
        supports = sample.supports()
        if supports is None and self._settings.sampling.truncates and self._tag.lists_supports:
            raise BadAnswer(
                f"sample {index} came without the tokens that its draws kept; expected them with every chunk: the tag "
                "of the replica says that it lists them"
            )
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
            supports=supports,
        )

    def _shared_prompt(self) -> NDArray[np.int32]:
        name, context = self._dispatch.prompt.prompt_id, self._settings.max_context
        with failing_as(FailReason.ENVIRONMENT, EnvironmentFailure, f"prompt {name}"):
            if len(self._envs) != self._dispatch.group_size:
                got = f"got {len(self._envs)} environments for a group of {self._dispatch.group_size}"
                raise EnvironmentFailure(f"{got}; expected one a sample")
            prompts = [env.prompt_ids() for env in self._envs]
            if any(ids is not prompts[0] and not np.array_equal(ids, prompts[0]) for ids in prompts):
                raise EnvironmentFailure(
                    "the environments of one group show different prompts; expected the same for all samples"
                )
            _check_given(prompts[0], "a prompt")
        if prompts[0].size + 1 > context:
            got = f"prompt {name} has {prompts[0].size} tokens, but the context of {context} must hold one more"
            raise EpisodeFailure(FailReason.PROMPT_TOO_LONG, f"{got}; shorten the prompt or raise engine.max_model_len")
        return prompts[0]

    def _request(self, request_id: str, sample: GrowingSample, indices: Sequence[int], turn: int) -> GenerationRequest:
        """`sample` goes on, once for each of `indices` (places in the group)."""
        settings, prompt = self._settings, self._dispatch.prompt
        room = settings.max_context - sample.length
        sampling = settings.sampling
        if room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        seeds: tuple[int, ...] = ()
        if settings.seed is not None:
            task = (settings.seed, prompt.pass_index, prompt.prompt_id)
            seeds = tuple(sampling_key(*task, index, turn) for index in indices)
        return GenerationRequest(
            request_id=request_id,
            prompt_ids=sample.token_ids(),
            num_samples=len(indices),
            sampling=sampling,
            eos_ids=self._eos_ids,
            seeds=seeds,
        )

    async def _turn(
        self,
        request: GenerationRequest,
        samples: Sequence[GrowingSample],
        turn: int,
        later_turns: asyncio.TaskGroup | None,
    ) -> None:
        """Serve one request. With `later_turns`, a sample that ends its turn goes on there.

        A request that the engine itself failed is not aborted: its id may be that of a request which was first and is
        still running.
        """
        with failing_as(FailReason.ENGINE, EngineError, f"request {request.request_id} on replica {self._tag.replica}"):
            try:
                async for chunk in self._engine.generate(request):
                    if chunk.request_id != request.request_id or not 0 <= chunk.sample_index < len(samples):
                        raise BadAnswer(
                            f"got sample {chunk.sample_index} of request {chunk.request_id}; expected samples 0 to "
                            f"{len(samples) - 1} of its own"
                        )
                    sample = samples[chunk.sample_index]
                    if sample.add(chunk, request, turn) and later_turns is not None:
                        later_turns.create_task(self._go_on(chunk.sample_index))
            except (BadAnswer, asyncio.CancelledError):
                await self._abort(request.request_id)
                raise
            unfinished = [index for index, sample in enumerate(samples) if sample.turns <= turn]
            if unfinished:
                raise BadAnswer(
                    f"the answer ended without a finish reason for samples {unfinished} of {len(samples)}; expected all"
                    " to finish"
                )

    async def _go_on(self, index: int) -> None:
        """The later turns of one sample: as long as it stops by itself, its environment replies, and the context has
        room."""
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
            await self._turn(request, (sample,), turn, None)

    async def _reply(self, index: int, sample: GrowingSample) -> NDArray[np.int32] | None:
        env = self._envs[index]
        name = f"environment {env.name}, sample {index} of dispatch {self._dispatch.dispatch_id}"
        with failing_as(FailReason.ENVIRONMENT, EnvironmentFailure, name):
            reply = await env.reply(sample.turn_ids())
            if reply is not None:
                _check_given(reply, "a reply")
            return reply

    async def _abort(self, request_id: str) -> None:
        """Best effort: the error that brought us here is the one to report, and an engine that cannot abort is found
        out by its health check."""
        with suppress(ConcordError), boundary(EngineError, f"abort of {request_id}"):
            async with asyncio.timeout(_ABORT_DEADLINE_S):
                await self._engine.abort(request_id)


def _check_given(token_ids: NDArray[np.int32], what: str) -> None:
    if token_ids.dtype != np.int32 or token_ids.ndim != 1 or token_ids.size == 0:
        raise EnvironmentFailure(
            f"got {what} of {token_ids.dtype} {token_ids.shape}; expected a non-empty int32 vector"
        )
