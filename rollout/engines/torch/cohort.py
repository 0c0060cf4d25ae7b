"""Rows that are decoded together: one batch, one KV cache. It knows no queue, no pause and no thread.

A cohort's step runs the model once over all of its rows. New rows join behind the old ones after a prefill of their
prompt; when rows finish, the last ones take their places, so the batch is dense at every step.
"""

from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engines.sampling.sampling import RowSampling, draw
from rollout.engines.serving.requests import cut
from rollout.engines.torch.cohort_cache import PrefillCache, RowCache
from rollout.engines.torch.model import DecodeModel
from rollout.engines.torch.routing import Experts, RoutingCapture
from rollout.types.generation import GenerationRequest, SamplingParams, TokenChunk
from rollout.types.supports import listed_supports
from rollout.types.trajectory import FinishReason, RoutingTrace
from rollout.types.weights import PolicyVersion

_PREFILL_TOKENS = 8192


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """One sample while it is generated."""

    request: GenerationRequest
    sample_index: int
    given: list[int]
    """Prompt and, for a continued sample, what it had produced."""
    max_tokens: int
    """Most tokens that may be added."""
    stop_ids: frozenset[int]
    uniforms: NDArray[np.float64]
    """[max_tokens]"""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    policies: list[tuple[PolicyVersion, int]] = field(default_factory=list[tuple[PolicyVersion, int]])
    """(policy, first token sampled under it)"""
    kept: list[list[int]] = field(default_factory=list[list[int]])
    """Where draws are truncated, the ids that each kept; none where they are many."""
    finish: FinishReason | None = None
    routing: list[Experts] = field(default_factory=list[Experts])
    """Pieces [n, blocks, top_k], for consecutive inputs from 0."""

    def accept(self, token: int, logprob: float, policy: PolicyVersion) -> bool:
        """Add a sampled token; whether the sample has ended."""
        if not self.policies or self.policies[-1][0] != policy:
            self.policies.append((policy, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish = FinishReason.STOP
        elif len(self.tokens) == self.max_tokens:
            self.finish = FinishReason.LENGTH
        return self.finish is not None

    def abort(self) -> None:
        self.finish = FinishReason.ABORT

    def chunks(self, policy: PolicyVersion) -> list[TokenChunk]:
        """All tokens, one chunk a policy; a sample without tokens (aborted) has one empty chunk under `policy`."""
        token_ids, logprobs = np.array(self.tokens, dtype=np.int32), np.array(self.logprobs, dtype=np.float32)
        starts, request_id = self.policies or [(policy, 0)], self.request.request_id
        return cut(
            request_id,
            self.sample_index,
            token_ids,
            logprobs,
            starts,
            self.finish,
            routing=self._trace(),
            supports=listed_supports(self.kept) if self.request.sampling.truncates else None,
        )

    def _trace(self) -> RoutingTrace | None:
        if not self.routing:
            return None
        chosen = cast(Experts, np.concatenate(self.routing))
        experts = cast(
            Experts, np.zeros((len(self.given) + len(self.tokens) - 1, *chosen.shape[1:]), dtype=chosen.dtype)
        )
        covered = np.zeros(experts.shape[0], dtype=np.bool_)
        experts[: chosen.shape[0]], covered[: chosen.shape[0]] = chosen[: experts.shape[0]], True
        return RoutingTrace(experts=experts, covered=covered)


class Cohort:
    """See the module."""

    def __init__(self, model: DecodeModel, routing: RoutingCapture | None) -> None:
        self.rows: list[Row] = []
        self._model, self._routing = model, routing
        self._cache = RowCache()
        self._sampling: RowSampling | None = None

    def admit(self, pieces: list[list[Row]], policy: PolicyVersion) -> list[Row]:
        """Prefill each piece's common prompt once, sample the first token of each of its rows; the rows that ended with
        it."""
        finished: list[Row] = []
        for batch in _batches(pieces):
            prompts = [piece[0].given for piece in batch]
            source = [i for i, piece in enumerate(batch) for _ in piece]
            rows = [row for piece in batch for row in piece]
            hidden, prefill = self._prefill(prompts)
            at = torch.tensor([len(prompt) - 1 for prompt in prompts], device=hidden.device)
            logits = self._model.logits(hidden[torch.arange(len(prompts), device=hidden.device), at])
            self._keep_prompt_routing(batch)
            self._cache.place(prefill, source, len(self.rows))
            self.rows.extend(rows)
            self._sampling = None
            sampling = RowSampling.of(_params(rows), self._model.vocab_size, self._model.device)
            finished += self._sample(rows, logits[torch.tensor(source, device=logits.device)], sampling, policy)
        self.remove(finished)
        return finished

    def step(self, policy: PolicyVersion) -> list[Row]:
        """One token for every row; the rows that ended with it."""
        tokens = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self._model.device)
        positions = self._cache.aim([len(row.given) + len(row.tokens) - 1 for row in self.rows], self._model.device)
        hidden = self._model.decode(tokens, positions, self._cache)
        if self._routing is not None:
            for row, chosen in zip(self.rows, self._routing.take(len(self.rows)), strict=True):
                row.routing.append(chosen)
        if self._sampling is None:
            self._sampling = RowSampling.of(_params(self.rows), self._model.vocab_size, self._model.device)
        finished = self._sample(self.rows, self._model.logits(hidden[:, 0]), self._sampling, policy)
        self.remove(finished)
        return finished

    def rebuild(self) -> None:
        """Compute the KV of all rows anew, under the weights that are loaded now.

        What was noted about tokens already sampled (log-probs, policy, routing) stays: it belongs to the weights that
        sampled them.
        """
        self._cache = RowCache()
        first = 0
        for batch in _batches([[row] for row in self.rows]):
            _, prefill = self._prefill([row.given + row.tokens[:-1] for (row,) in batch])
            if self._routing is not None:
                self._routing.clear()
            self._cache.place(prefill, list(range(len(batch))), first)
            first += len(batch)

    def remove(self, gone: list[Row]) -> None:
        """Take rows out; the last rows move into their places."""
        if not gone:
            return
        leaving = set(gone)
        kept = len(self.rows) - len(gone)
        holes = [i for i in range(kept) if self.rows[i] in leaving]
        movers = [i for i in range(kept, len(self.rows)) if self.rows[i] not in leaving]
        if holes:
            width = max(len(self.rows[i].given) + len(self.rows[i].tokens) for i in movers)
            self._cache.move(movers, holes, width)
            for hole, mover in zip(holes, movers, strict=True):
                self.rows[hole] = self.rows[mover]
        del self.rows[kept:]
        self._sampling = None

    def _sample(self, rows: list[Row], logits: Tensor, sampling: RowSampling, policy: PolicyVersion) -> list[Row]:
        uniform = torch.tensor(
            [[row.uniforms[len(row.tokens)]] for row in rows], dtype=torch.float64, device=logits.device
        )
        tokens, logprobs, kept = draw(logits, sampling, uniform)
        for row, ids in zip(rows, kept or (), strict=kept is not None):
            if row.request.sampling.truncates:
                row.kept.append(ids)
        return [
            row
            for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True)
            if row.accept(token, logprob, policy)
        ]

    def _prefill(self, sequences: list[list[int]]) -> tuple[Tensor, PrefillCache]:
        width = max(len(sequence) for sequence in sequences)
        padded = [sequence + [0] * (width - len(sequence)) for sequence in sequences]
        return self._model.prefill(torch.tensor(padded, device=self._model.device))

    def _keep_prompt_routing(self, batch: list[list[Row]]) -> None:
        if self._routing is None:
            return
        for piece, chosen in zip(batch, self._routing.take(len(batch)), strict=True):
            for row in piece:
                row.routing.append(chosen[: len(row.given)])


def _params(rows: list[Row]) -> list[SamplingParams]:
    return [row.request.sampling for row in rows]


def _batches(pieces: list[list[Row]]) -> list[list[list[Row]]]:
    """Consecutive pieces whose padded prefill stays within the token budget (one longer piece makes its own batch)."""
    batches: list[list[list[Row]]] = []
    width = 0
    for piece in pieces:
        length = len(piece[0].given) + max(len(row.tokens) for row in piece)
        width = max(width, length)
        if not batches or width * (len(batches[-1]) + 1) > _PREFILL_TOKENS:
            batches.append([])
            width = length
        batches[-1].append(piece)
    return batches
