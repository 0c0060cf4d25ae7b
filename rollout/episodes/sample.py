"""One sample while it grows, turn by turn, into a trajectory. Positions are shifted from a turn to the whole trajectory
here, once.

A token's version is its chunk's: no clock and no dispatch has a say in it. Given ids are kept as they were sent:
nothing is tokenized again.
"""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.errors import EngineError
from rollout.types.generation import GenerationRequest, TokenChunk
from rollout.types.logprob_range import LEAST_NATS, impossible
from rollout.types.supports import TokenSupports, joined_supports, unlisted
from rollout.types.trajectory import FinishReason, RoutingTrace, VersionSpan
from rollout.types.weights import PolicyVersion


class BadAnswer(EngineError):
    """What an engine answered breaks the terms of the request."""


class GrowingSample:
    """Owned by one episode. `add` takes an engine's chunks, `give` the environment's tokens; the arrays are made at the
    end."""

    def __init__(self, prompt_ids: NDArray[np.int32]) -> None:
        self.length = prompt_ids.size
        """Tokens so far."""
        self.turns = 0
        """Turns that have ended."""
        self.finish_reason: FinishReason | None = None
        """The finish reason of the newest turn, None while it runs."""
        self.ended_at_s = 0.0
        """When the newest turn ended, by `time.perf_counter`."""
        self._ids = [prompt_ids]
        self._sampled: list[tuple[int, NDArray[np.float32]]] = []
        self._spans: list[tuple[PolicyVersion, int, int]] = []
        self._routing: list[RoutingTrace] = []
        self._supports: list[tuple[int, TokenSupports]] = []
        self._turn_start, self._turn_piece = self.length, 1

    def add(self, chunk: TokenChunk, request: GenerationRequest, turn: int) -> bool:
        """Take a chunk of turn `turn` (from 0), which `request` asked for; True when it ends the turn.

        Raises:
            BadAnswer: the chunk does not belong here, or the turn that it ends breaks the request's terms.
        """
        if self.turns != turn:
            raise BadAnswer(
                f"sample {chunk.sample_index} went on after its finish reason; expected the reason on its last chunk "
                "only"
            )
        if chunk.token_ids.dtype != np.int32 or chunk.logprobs.dtype != np.float32:
            got = f"{chunk.token_ids.dtype} ids and {chunk.logprobs.dtype} log-probs"
            raise BadAnswer(f"sample {chunk.sample_index} came as {got}; expected int32 and float32")
        self._check_logprobs(chunk)
        count = chunk.token_ids.size
        if count:
            if chunk.supports is not None:
                self._supports.append((self.length, chunk.supports))
            self._append(chunk, count)
        if chunk.routing is not None:
            self._routing.append(chunk.routing)
        if chunk.finish_reason is None:
            return False
        self.finish_reason = chunk.finish_reason
        self._check_turn(chunk, request)
        self.turns += 1
        self.ended_at_s = time.perf_counter()
        return True

    def give(self, token_ids: NDArray[np.int32]) -> None:
        """Append the environment's tokens; a new turn starts behind them."""
        self._ids.append(token_ids)
        self.length += token_ids.size
        self._turn_start, self._turn_piece = self.length, len(self._ids)
        self.finish_reason = None

    def cut_off(self) -> None:
        """The context holds no further turn."""
        self.finish_reason = FinishReason.LENGTH

    def token_ids(self) -> NDArray[np.int32]:
        """[length] everything so far: what the next request sends and, at the end, the trajectory's ids."""
        return np.concatenate(self._ids)

    def turn_ids(self) -> NDArray[np.int32]:
        """[n] tokens sampled in the newest turn."""
        return np.concatenate(self._ids[self._turn_piece :])

    def sampled_mask(self) -> NDArray[np.bool_]:
        """[length] True where the policy chose the token."""
        mask = np.zeros(self.length, dtype=np.bool_)
        for start, logprobs in self._sampled:
            mask[start : start + logprobs.size] = True
        return mask

    def logprobs(self) -> NDArray[np.float32]:
        """[length] nats, 0 where not sampled."""
        values = np.zeros(self.length, dtype=np.float32)
        for start, logprobs in self._sampled:
            values[start : start + logprobs.size] = logprobs
        return values

    def spans(self) -> tuple[VersionSpan, ...]:
        """Versions of the sampled tokens, in positions of the whole trajectory."""
        return tuple(VersionSpan(policy, start, end) for policy, start, end in self._spans)

    def routing(self) -> RoutingTrace | None:
        """Routing of the whole sequence; of a row that several turns report, the turn that was first: the others only
        prefilled it."""
        if not self._routing or (len(self._routing) == 1 and self.turns == 1):
            return self._routing[0] if self._routing else None
        return _merged_routing(self._routing, self.length - 1)

    def supports(self) -> TokenSupports | None:
        """[length] what the sampler kept of each draw; None where it never said so."""
        if not self._supports:
            return None
        parts: list[TokenSupports] = []
        end = 0
        for start, supports in self._supports:
            parts += [unlisted(start - end), supports]
            end = start + supports.counts.size
        return joined_supports([*parts, unlisted(self.length - end)])

    def _append(self, chunk: TokenChunk, count: int) -> None:
        start, end = self.length, self.length + count
        self._ids.append(chunk.token_ids)
        self._sampled.append((start, chunk.logprobs))
        if self._spans and self._spans[-1][0] == chunk.policy and self._spans[-1][2] == start:
            start = self._spans.pop()[1]
        self._spans.append((chunk.policy, start, end))
        self.length = end

    def _check_logprobs(self, chunk: TokenChunk) -> None:
        wrong = np.flatnonzero(impossible(chunk.logprobs))
        if wrong.size:
            first = int(wrong[0])
            raise BadAnswer(
                f"sample {chunk.sample_index} came with {wrong.size} of {chunk.logprobs.size} log-probs that no "
                f"sampled token has ({float(chunk.logprobs[first]):g} for token {int(chunk.token_ids[first])} at "
                f"position {self.length + first}); expected numbers from {LEAST_NATS:g} to 0: the engine must report "
                "the log-prob of the token under the distribution that it sampled from, and no stand-in for one that "
                "it lacks"
            )

    def _check_turn(self, chunk: TokenChunk, request: GenerationRequest) -> None:
        index, count, limit = chunk.sample_index, self.length - self._turn_start, request.sampling.max_new_tokens
        if chunk.finish_reason is FinishReason.ABORT:
            raise BadAnswer(f"sample {index} was aborted after {count} tokens; expected it to finish")
        if not 0 < count <= limit:
            raise BadAnswer(f"sample {index} ended with {count} tokens; expected 1 to {limit}")
        last = int(self._ids[-1][-1])
        if chunk.finish_reason is FinishReason.STOP and last not in request.eos_ids:
            got = f"sample {index} stopped, but its last token {last} is none of the end tokens {request.eos_ids}"
            raise BadAnswer(f"{got}; the engine must return the token that stopped it")


def _merged_routing(parts: Sequence[RoutingTrace], rows: int) -> RoutingTrace:
    dtype = np.result_type(*(part.experts.dtype for part in parts))
    experts = np.zeros((rows, *parts[0].experts.shape[1:]), dtype=dtype)
    covered = np.zeros(rows, dtype=np.bool_)
    for part in reversed(parts):
        known = np.flatnonzero(part.covered)
        experts[known] = part.experts[known]
        covered[known] = True
    return RoutingTrace(experts=experts, covered=covered)
