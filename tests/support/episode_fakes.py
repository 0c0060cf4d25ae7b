"""Fakes at the seams of an episode: an engine that answers as told, environments that talk back, a judge. They keep
what they were asked."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from support.builders import BASE
from support.paths import MODEL

from rollout.config import SamplingConfig, ScriptedConfig
from rollout.engines.scripted.engine import ScriptedEngine
from rollout.errors import EngineError
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, TokenChunk
from rollout.types.prompts import Prompt
from rollout.types.supports import TokenSupports
from rollout.types.trajectory import FinishReason, Reward, RoutingTrace, Trajectory
from rollout.types.weights import PolicyVersion

TOKENIZER = load_tokenizer(MODEL)
EOS = 1


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def chunk(
    request: GenerationRequest,
    sample: int,
    tokens: Sequence[int],
    policy: PolicyVersion = BASE,
    finish: FinishReason | None = None,
    routing: RoutingTrace | None = None,
    supports: TokenSupports | None = None,
) -> TokenChunk:
    """A chunk whose log-probs are -TOKEN / 100."""
    logprobs = np.array([-token / 100 for token in tokens], dtype=np.float32)
    return TokenChunk(
        request_id=request.request_id,
        sample_index=sample,
        token_ids=ids(*tokens),
        logprobs=logprobs,
        policy=policy,
        finish_reason=finish,
        routing=routing,
        supports=supports,
    )


def stopping(*tokens: int, policy: PolicyVersion = BASE) -> Callable[[GenerationRequest], list[TokenChunk]]:
    """Every sample of a request: `tokens`, then the end token."""
    return lambda request: [
        chunk(request, i, (*tokens, EOS), policy, FinishReason.STOP) for i in range(request.num_samples)
    ]


class ToldEngine(ScriptedEngine):
    """Answers each request with the chunks of `answer`; holds the request ids of `held` back from `holding` until
    `release`."""

    def __init__(self, answer: Callable[[GenerationRequest], Iterable[TokenChunk]], held: Sequence[str] = ()) -> None:
        sampling = SamplingConfig()
        super().__init__(ScriptedConfig(), EngineIdentity(replica=0, seed=0, deterministic=False, sampling=sampling))
        self._answer, self._held = answer, held
        self.requests: list[GenerationRequest] = []
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self.holding = asyncio.Event()
        self.release = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        if request.request_id in self.running:
            raise EngineError(f"request {request.request_id} is already running")
        self.requests.append(request)
        self.running.add(request.request_id)
        if request.request_id in self._held:
            self.holding.set()
            await self.release.wait()
        for answer in self._answer(request):
            yield answer
            await asyncio.sleep(0)
        self.running.discard(request.request_id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.running.discard(request_id)


@dataclass
class TalkingEnv:
    """Says one of `replies` after each turn, then nothing."""

    replies: list[NDArray[np.int32]]
    prompt: NDArray[np.int32] = field(default_factory=lambda: ids(3, 14))
    heard: list[list[int]] = field(default_factory=list[list[int]])
    name: str = "talking"

    def prompt_ids(self) -> NDArray[np.int32]:
        return self.prompt

    async def reply(self, sampled_ids: NDArray[np.int32]) -> NDArray[np.int32] | None:
        self.heard.append(sampled_ids.tolist())
        await asyncio.sleep(0)
        return self.replies.pop(0) if self.replies else None


@dataclass
class RecordingJudge:
    """Rewards sample i with i."""

    completions: list[str] = field(default_factory=list[str])

    async def __call__(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]
    ) -> Sequence[Reward]:
        self.completions += completions
        return [Reward(total=float(index)) for index in range(len(trajectories))]
