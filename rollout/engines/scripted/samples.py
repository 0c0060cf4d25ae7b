"""The samples of the scripted engine's requests: how long, for how long, which tokens. It knows no slots and no
clock."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout.config import ScriptedConfig
from rollout.engines.sampling.draw_keys import request_keys
from rollout.engines.scripted.clock import Clock, Timer
from rollout.engines.scripted.draws import ScriptedDraws, draw_bits
from rollout.engines.serving.requests import cut, tokens_left
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, SamplingParams, TokenChunk
from rollout.types.supports import SUPPORT_LIMIT, TokenSupports
from rollout.types.trajectory import FinishReason
from rollout.types.weights import PolicyVersion


@dataclass(slots=True, eq=False)
class ScriptedSample:
    """One sample on its way through a slot."""

    request: "ScriptedRequest"
    index: int
    bits: int
    """Random bits that decide its length, latency and tokens."""
    first: int
    """Tokens that it had before this request (`resume_from`)."""
    length: int
    """Tokens of the whole sample."""
    latency_s: float
    elapsed_s: float = 0.0
    """Time spent in a slot before the newest start."""
    started_s: float | None = None
    """When it last started; None while it waits or is frozen."""
    done: int = 0
    """Tokens sampled so far, `first` included."""
    policies: list[tuple[PolicyVersion, int]] = field(default_factory=list[tuple[PolicyVersion, int]])
    """(policy, first token sampled under it)"""
    timer: Timer | None = None
    ended: bool = False

    def start(self, clock: Clock, at_s: float, complete: Callable[["ScriptedSample", float], None]) -> None:
        """Run from `at_s` on; once its latency is over, call `complete` with the time at which it was."""
        due_s = at_s + self.latency_s - self.elapsed_s
        self.started_s, self.timer = at_s, clock.call_at(due_s, lambda: complete(self, due_s))

    def freeze(self, now_s: float, policy: PolicyVersion) -> bool:
        """Stop its clock, with the tokens that its time was enough for, the new ones under `policy`; whether it ran."""
        if self.started_s is None:
            return False
        self.elapsed_s = min(self.latency_s, self.elapsed_s + max(0.0, now_s - self.started_s))
        self.stop()
        share = self.elapsed_s / self.latency_s if self.latency_s else 0.0
        self.sampled_until(self.first + int(share * (self.length - self.first)), policy)
        return True

    def stop(self) -> bool:
        """Stop its clock; whether it ran."""
        if self.timer is None:
            return False
        self.timer.cancel()
        self.timer = self.started_s = None
        return True

    def sampled_until(self, stop: int, policy: PolicyVersion) -> None:
        """It has the tokens up to `stop`, the new ones under `policy`."""
        if stop > self.done and (not self.policies or self.policies[-1][0] != policy):
            self.policies.append((policy, self.done))
        self.done = max(self.done, stop)

    def end(self, policy: PolicyVersion) -> None:
        """It gets no further token; without any, it ended under `policy`."""
        self.policies = self.policies or [(policy, self.first)]
        self.ended = True


@dataclass(slots=True, eq=False)
class ScriptedRequest:
    """A request while it runs."""

    request: GenerationRequest
    limit: int
    """Most tokens that a sample may have."""
    samples: list[ScriptedSample]
    chunks: asyncio.Queue[list[TokenChunk]]
    """One entry a finished sample."""

    @property
    def running(self) -> list[ScriptedSample]:
        return [sample for sample in self.samples if not sample.ended]


class SampleScript:
    """Writes what a request's samples will be, and reads it out as chunks."""

    def __init__(self, config: ScriptedConfig, identity: EngineIdentity, shortest: int | None) -> None:
        self._config, self._identity, self._shortest = config, identity, shortest
        self._draws = ScriptedDraws(config.vocab_size, config.latency_mean_s, config.latency_sigma)

    def begin(self, request: GenerationRequest, first: int) -> ScriptedRequest:
        """The samples of a request that continues after `first` tokens.

        Raises:
            UserError: there is no room for a token.
        """
        longest = first + tokens_left(request, first, self._config.max_model_len)
        record = ScriptedRequest(request, longest, [], asyncio.Queue())
        for index, key in enumerate(request_keys(request, self._identity.seed, self._identity.replica)):
            shortest = longest
            if self._shortest is not None and not request.sampling.ignore_eos:
                shortest = min(longest, max(self._shortest, first + 1))
            bits = draw_bits(key)
            length = longest if shortest == longest else self._draws.length(bits, shortest, longest)
            latency_s = self._draws.latency_s(bits) * (length - first) / length if self._config.latency_mean_s else 0.0
            record.samples.append(ScriptedSample(record, index, bits, first, length, latency_s, done=first))
        return record

    def chunks(self, sample: ScriptedSample, finish: FinishReason | None) -> list[TokenChunk]:
        """One chunk a policy; with `finish` None the length decides."""
        request = sample.request.request
        stops = finish is None and sample.length < sample.request.limit and bool(request.eos_ids)
        token_ids = self._draws.tokens(sample.bits, 0, sample.done, request.eos_ids)
        if stops:
            token_ids = token_ids.copy()
            token_ids[-1] = request.eos_ids[0]
        logprobs = self._draws.logprobs(sample.bits, 0, sample.done)
        reason = finish or (FinishReason.STOP if stops else FinishReason.LENGTH)
        supports = self._supports(token_ids, request.sampling) if request.sampling.truncates else None
        return cut(request.request_id, sample.index, token_ids, logprobs, sample.policies, reason, supports=supports)

    def _supports(self, token_ids: NDArray[np.int32], sampling: SamplingParams) -> TokenSupports:
        """Each token and the ids behind it: as many as top-k keeps, where that is few enough to be listed; under top-p
        alone four, as a sharp distribution would."""
        width = min(sampling.top_k or 4, self._config.vocab_size)
        width = 0 if width > SUPPORT_LIMIT else width
        ids = (token_ids[:, None] + np.arange(width, dtype=np.int32)) % np.int32(self._config.vocab_size)
        return TokenSupports(counts=np.full(token_ids.size, width, dtype=np.uint8), ids=ids.reshape(-1))

    def score(self, key: int, count: int) -> NDArray[np.float32]:
        return self._draws.logprobs(draw_bits(key), 0, count).copy()
