"""What passes between an episode and an engine."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rollout.types.supports import TokenSupports
from rollout.types.trajectory import FinishReason, RoutingTrace
from rollout.types.weights import PolicyVersion
from rollout.types.wire import wired


@wired
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Log-probs are reported after temperature and truncation."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    ignore_eos: bool = False
    """Sample `max_new_tokens` tokens whatever they are (for fixed work)."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens are out of reach of a draw."""
        return self.top_p < 1.0 or self.top_k > 0


@wired
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """`num_samples` independent continuations of one prompt."""

    request_id: str
    """Idempotent: an engine that sees an id again while it runs answers with an error, never with a second
    generation."""
    prompt_ids: NDArray[np.int32]
    """[P]"""
    num_samples: int
    sampling: SamplingParams
    eos_ids: tuple[int, ...]
    """A sample stops after any of these (unless `ignore_eos`); the stop token is part of the sample."""
    seeds: tuple[int, ...] = ()
    """One 63-bit sampling key a sample, or empty: the engine draws its own."""

    def __post_init__(self) -> None:
        if self.prompt_ids.ndim != 1 or self.prompt_ids.size == 0 or self.prompt_ids.dtype != np.int32:
            raise ValueError(
                f"request {self.request_id}: prompt_ids must be a non-empty int32 vector, got {self.prompt_ids.dtype} "
                f"{self.prompt_ids.shape}"
            )
        if self.num_samples < 1 or (self.seeds and len(self.seeds) != self.num_samples):
            raise ValueError(
                f"request {self.request_id}: {self.num_samples} samples and {len(self.seeds)} seeds; expected one seed "
                "a sample or none"
            )


@wired
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenChunk:
    """A run of tokens of one sample, all sampled under one policy version; normally a whole turn."""

    request_id: str
    sample_index: int
    token_ids: NDArray[np.int32]
    """[n]"""
    logprobs: NDArray[np.float32]
    """[n] nats, of the distribution that was sampled from."""
    policy: PolicyVersion
    finish_reason: FinishReason | None = None
    """Set on the last chunk of a sample only."""
    routing: RoutingTrace | None = None
    """On the last chunk of a sample only: routing of the whole sequence, prompt included."""
    supports: TokenSupports | None = None
    """[n] what the sampler kept of each draw; None where it kept everything, or does not say."""

    def __post_init__(self) -> None:
        if self.token_ids.shape != self.logprobs.shape or self.token_ids.ndim != 1:
            raise ValueError(
                f"request {self.request_id}: {self.token_ids.shape} ids but {self.logprobs.shape} log-probs in one "
                "chunk"
            )
        if self.supports is not None and self.supports.counts.shape != self.token_ids.shape:
            raise ValueError(
                f"request {self.request_id}: {self.token_ids.shape} ids but supports of {self.supports.counts.shape} "
                "tokens in one chunk"
            )


class PauseMode(StrEnum):
    """What happens to running requests while weights change."""

    RECOMPUTE = "recompute"
    """Keep their tokens; rebuild their KV under the new weights."""
    KEEP = "keep"
    """Keep tokens and KV: later tokens attend to KV that older weights wrote."""
    DRAIN = "drain"
    """Finish running requests under the old weights first; new ones wait (deterministic mode)."""
