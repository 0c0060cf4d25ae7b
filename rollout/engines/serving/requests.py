"""Requests as every engine takes and answers them. It knows no model and no inference library."""

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.errors import EngineError, UserError
from rollout.types.generation import GenerationRequest, TokenChunk
from rollout.types.supports import TokenSupports
from rollout.types.trajectory import FinishReason, RoutingTrace
from rollout.types.weights import PolicyVersion

NOTHING = np.zeros(0, dtype=np.int32)
"""What a sample has produced before its first request."""


def refuse_running(request: GenerationRequest, running: Container[str], replica: int) -> None:
    """Raise an EngineError for a request whose id is already running."""
    if request.request_id in running:
        raise EngineError(
            f"request {request.request_id} is already running on replica {replica}; ids are idempotent, use a new one"
        )


def refuse_several(request: GenerationRequest) -> None:
    """Raise an EngineError for a request that continues several samples."""
    if request.num_samples != 1:
        raise EngineError(f"request {request.request_id}: got {request.num_samples} samples to resume; expected 1")


def tokens_left(request: GenerationRequest, produced: int, context_tokens: int | None) -> int:
    """Tokens that a sample may add to the `produced` ones, within `max_new_tokens` and the context (None: no limit).

    Raises:
        UserError: there is no room for one.
    """
    left = request.sampling.max_new_tokens - produced
    if context_tokens is not None:
        left = min(left, context_tokens - request.prompt_ids.size - produced)
    if left < 1:
        raise UserError(
            f"request {request.request_id}: {request.prompt_ids.size} prompt tokens and {produced} produced ones leave "
            f"no room for a token (max_new_tokens {request.sampling.max_new_tokens}, context {context_tokens}); "
            "shorten the prompt or raise the limits"
        )
    return left


def check_ids(what: str, token_ids: NDArray[np.int32], vocab_size: int) -> None:
    """Raise a UserError for ids that have no row in the embedding."""
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= vocab_size:
        raise UserError(
            f"{what}: got token ids from {low} to {high}; the model knows 0 to {vocab_size - 1}: use the tokenizer "
            "that belongs to it"
        )


def cut(
    request_id: str,
    sample_index: int,
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    starts: Sequence[tuple[PolicyVersion, int]],
    finish: FinishReason | None,
    routing: RoutingTrace | None = None,
    supports: TokenSupports | None = None,
) -> list[TokenChunk]:
    """A whole sample as chunks, one a policy.

    Args:
        token_ids: [n].
        logprobs: [n] nats.
        starts: (policy, first token sampled under it) in order, at least one; each reaches to the next, the last to n.
        finish: why the sample ended; it goes with the last chunk.
        routing: the trace of the whole sequence; it goes with the last chunk.
        supports: [n] what each draw kept, where draws are truncated.
    """
    ends = [start for _, start in starts[1:]] + [token_ids.size]
    last = len(starts) - 1
    return [
        TokenChunk(
            request_id=request_id,
            sample_index=sample_index,
            token_ids=token_ids[start:end],
            logprobs=logprobs[start:end],
            policy=policy,
            finish_reason=finish if i == last else None,
            routing=routing if i == last else None,
            supports=None if supports is None else supports.cut(start, end),
        )
        for i, ((policy, start), end) in enumerate(zip(starts, ends, strict=True))
    ]
