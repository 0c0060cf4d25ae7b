"""Between Concord's requests and vLLM's: sampling parameters going in, chunks cut by vLLM's own version spans coming
out.

It knows no engine process and no weights. vLLM is imported when a function is called, after the engine has set the
environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollout.engines.serving.requests import NOTHING, check_ids, cut, tokens_left
from rollout.engines.vllm.routing import trace_of
from rollout.errors import EngineError
from rollout.types.generation import GenerationRequest, SamplingParams, TokenChunk
from rollout.types.supports import SUPPORT_LIMIT, TokenSupports
from rollout.types.trajectory import FinishReason, RoutingTrace
from rollout.types.weights import PolicyVersion

if TYPE_CHECKING:
    from vllm.inputs.engine import TokensInput
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

Policies = Mapping[str, PolicyVersion]
"""Every policy that an engine has served, by label."""
MOST_LOGPROBS = SUPPORT_LIMIT + 1
"""Likeliest tokens of a draw that are ever asked for: one more than are listed, to see where they end."""
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(frozen=True, slots=True)
class Part:
    """One vLLM request: all samples of a request without seeds, or one sample with its seed."""

    key: str
    """vLLM's request id."""
    first_sample: int
    prompt: "TokensInput"
    params: "VllmSamplingParams"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model can take."""

    context_tokens: int
    vocab_size: int
    expert_layers: tuple[int, ...] = ()
    """Layers whose routing is returned with a sample; empty: none is asked for."""


def parts_of(request: GenerationRequest, produced: NDArray[np.int32], limits: Limits) -> list[Part]:
    """The vLLM requests that answer `request` after `produced` tokens; one with `n` samples, or with seeds one a
    sample.

    Raises:
        UserError: an id is outside the vocabulary, or no token fits into `max_new_tokens` or the context.
    """
    from vllm.inputs.engine import tokens_input

    ids = np.concatenate([request.prompt_ids, produced])
    check_ids(f"request {request.request_id}", ids, limits.vocab_size)
    room = tokens_left(request, produced.size, limits.context_tokens)
    prompt = tokens_input(ids.tolist())
    if not request.seeds:
        params = _params(request, room, request.num_samples, None, limits.vocab_size)
        return [Part(request.request_id, 0, prompt, params)]
    return [
        Part(f"{request.request_id}#{index}", index, prompt, _params(request, room, 1, seed, limits.vocab_size))
        for index, seed in enumerate(request.seeds)
    ]


def scoring_params() -> "VllmSamplingParams":
    """Raw log-probs of a prompt: vLLM takes them before temperature and truncation in every mode."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def chunks_of(
    request_id: str,
    part: Part,
    output: "RequestOutput",
    policies: Policies,
    now: PolicyVersion,
    layers: tuple[int, ...] = (),
) -> list[TokenChunk]:
    """The chunks of one finished vLLM request.

    Args:
        request_id: Concord's id of the request.
        part: what was asked.
        output: vLLM's final output.
        policies: every policy that this engine has served, by label.
        now: the policy in force; it labels a sample that was aborted before its first token.
        layers: those with experts, where routing is asked for.

    Raises:
        EngineError: tokens without a known label, without log-probs, or a sample that ended for no reason known here.
    """
    chunks: list[TokenChunk] = []
    for completion in output.outputs:
        rows = len(part.prompt["prompt_token_ids"]) + len(completion.token_ids) - 1
        routing = trace_of(completion.routed_experts, rows, layers) if layers else None
        sample, width = part.first_sample + completion.index, part.params.logprobs or 0
        chunks += _chunks(request_id, sample, completion, policies, now, routing, width)
    return chunks


def aborted_chunks(request_id: str, part: Part, now: PolicyVersion) -> list[TokenChunk]:
    """Empty samples of a part that was aborted before it was asked."""
    samples = range(part.first_sample, part.first_sample + part.params.n)
    empty = np.zeros(0, dtype=np.float32)
    return [chunk for i in samples for chunk in cut(request_id, i, NOTHING, empty, [(now, 0)], FinishReason.ABORT)]


def _chunks(
    request_id: str,
    sample: int,
    completion: "CompletionOutput",
    policies: Policies,
    now: PolicyVersion,
    routing: RoutingTrace | None,
    width: int,
) -> list[TokenChunk]:
    what = f"request {request_id}, sample {sample}"
    finish = _FINISH.get(completion.finish_reason or "")
    if finish is None:
        raise EngineError(
            f"{what}: vLLM ended it with reason {completion.finish_reason!r}; expected one of {', '.join(_FINISH)}"
        )
    token_ids = np.asarray(completion.token_ids, dtype=np.int32)
    answered = _flat_logprobs(completion, what)
    logprobs = np.asarray(answered.logprobs, dtype=np.float32)
    if logprobs.size != token_ids.size * (1 + width):
        raise EngineError(
            f"{what}: vLLM answered {token_ids.size} tokens with {logprobs.size} log-probs; expected {1 + width} each"
        )
    logprobs = logprobs.reshape(-1, 1 + width)
    supports = _supports(answered, logprobs) if width else None
    starts = _starts(completion, token_ids.size, policies, what) or [(now, 0)]
    return cut(request_id, sample, token_ids, logprobs[:, 0].copy(), starts, finish, routing, supports)


def _supports(answered: "FlatLogprobs", logprobs: NDArray[np.float32]) -> TokenSupports:
    """What each draw kept. vLLM answers with the token and then with the likeliest ones, [n, 1 + width] in all, -inf
    where they are out of reach; where even the last of them is in reach there may be more, and none is listed."""
    kept = logprobs[:, 1:] > -np.inf
    kept[kept.all(axis=1)] = False
    ids = np.asarray(answered.token_ids, dtype=np.int32).reshape(logprobs.shape)[:, 1:]
    return TokenSupports(counts=kept.sum(axis=1).astype(np.uint8), ids=ids[kept])


def _starts(
    completion: "CompletionOutput", num_tokens: int, policies: Policies, what: str
) -> list[tuple[PolicyVersion, int]]:
    """(policy, first token) of vLLM's version spans, which must cover the tokens without gap or overlap."""
    starts: list[tuple[PolicyVersion, int]] = []
    position = 0
    for span in completion.weight_versions or ():
        policy = policies.get(span.version)
        if policy is None:
            served = ", ".join(sorted(policies))
            raise EngineError(
                f"{what}: tokens {span.start} to {span.end} carry the label {span.version!r}; this engine has served "
                f"{served}"
            )
        if span.start != position or span.end <= position:
            raise EngineError(
                f"{what}: version spans {completion.weight_versions} leave a gap or overlap at token {position}"
            )
        starts.append((policy, position))
        position = span.end
    if position != num_tokens:
        raise EngineError(
            f"{what}: version spans cover {position} of {num_tokens} tokens; every token must carry the policy that "
            "sampled it"
        )
    return starts


def _flat_logprobs(completion: "CompletionOutput", what: str) -> "FlatLogprobs":
    from vllm.logprobs import FlatLogprobs

    if completion.logprobs is None and not completion.token_ids:
        return FlatLogprobs()
    if not isinstance(completion.logprobs, FlatLogprobs):
        raise EngineError(
            f"{what}: vLLM answered log-probs of type {type(completion.logprobs).__name__}; expected FlatLogprobs"
        )
    return completion.logprobs


def _width(sampling: SamplingParams, vocab_size: int) -> int:
    """Likeliest tokens of each draw that are asked for: one more than can be kept, or than are listed; 0 where every
    token is in reach."""
    return min(sampling.top_k or SUPPORT_LIMIT, SUPPORT_LIMIT, vocab_size - 1) + 1 if sampling.truncates else 0


def _params(
    request: GenerationRequest, room: int, num_samples: int, seed: int | None, vocab_size: int
) -> "VllmSamplingParams":
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSamplingParams

    sampling = request.sampling
    return VllmSamplingParams(
        n=num_samples,
        seed=seed,
        max_tokens=room,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=None if sampling.ignore_eos else list(request.eos_ids),
        logprobs=_width(sampling, vocab_size),
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
