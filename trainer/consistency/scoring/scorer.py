"""Scores trajectories with the trainer's own numerics, each token at the version that sampled it.

    trajectories -> rows (a prefix under one policy) -> versions, each put into the module once -> padded batches
    -> log-probs -> [T] a trajectory

The module is the trainer's, without FSDP: parameters in the compute dtype, rotary buffers in float32. It knows no
ledger, no verdict and no actor; the number of compute threads is its process's (`torch.set_num_threads`).
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from rollout.engines.torch.moe_routers import expert_counts, find_routers
from rollout.errors import UserError
from rollout.types.trajectory import Trajectory, VersionSpan
from rollout.types.weights import PolicyVersion
from trainer.consistency.checks.routing import RoutingAgreement
from trainer.consistency.checks.step import Moved
from trainer.consistency.scoring.engine_head import likeliest_tokens, rounded_logprobs
from trainer.consistency.scoring.held_versions import HeldVersions, VersionGoneError
from trainer.consistency.scoring.moments import token_moments
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.consistency.scoring.routing import RoutingListener
from trainer.consistency.scoring.rows import (
    Sampler,
    ScoreBatch,
    ScoreRow,
    batch_routing,
    batch_support,
    batches_of,
    continued_rows,
    generations,
    padded,
    prefix_rows,
)
from trainer.consistency.scoring.weight_formats import conversion
from trainer.model.logprobs import chunked_logprobs
from trainer.model.policy_model import PolicyModel
from trainer.model.routing_replay import RoutingReplay

_Scores = list[NDArray[np.float32]]
_Continued = list[tuple[PolicyVersion, ScoreRow]]


@dataclass(slots=True)
class _Plan:
    """What one call computes."""

    rows: dict[PolicyVersion, dict[Sampler, list[ScoreRow]]]
    """Recomputed prefixes; they share batches."""
    continued: list[tuple[Sampler, _Continued]]
    """Generations over a kept cache, one at a time."""


@dataclass(frozen=True, slots=True)
class _Experts:
    """Hooks on the routers of a mixture of experts; without effect until they are asked for."""

    number: int
    """Experts of a block."""
    cell: tuple[int, int]
    """(blocks, top_k): the shape that a trace must have."""
    listener: RoutingListener
    replay: RoutingReplay


class Scorer:
    """Implements `MomentRescorer`. Not for two threads at once."""

    def __init__(self, versions: HeldVersions, batch_tokens: int) -> None:
        """Score with the module of `versions`, in forward passes of at most `batch_tokens` (rows x longest row)."""
        self._versions, self._model = versions, versions.model
        self._batch_tokens, self._device = batch_tokens, versions.device
        self._experts = _experts_of(self._model)
        self._listens = False
        self._moments: list[NDArray[np.float32]] | None = None
        self._unknown: dict[str, str] = {}
        self._scored_tokens = 0

    @property
    def model(self) -> PolicyModel:
        """The module, under the weights of the version used last."""
        return self._model

    @property
    def held(self) -> dict[str, str]:
        """Key of each version in memory -> digest of its weights (empty for `v0`, the base model)."""
        return self._versions.held

    @property
    def held_bytes(self) -> int:
        """Memory of all held weights."""
        return self._versions.held_bytes

    @property
    def scored_tokens(self) -> int:
        """Tokens that it was asked for so far."""
        return self._scored_tokens

    @property
    def unknown(self) -> dict[str, str]:
        """Key of each policy whose tokens are NaN in the last call -> reason."""
        return dict(self._unknown)

    def moved(self, before: PolicyVersion, after: PolicyVersion, decayed: float) -> dict[str, Moved]:
        """As `HeldVersions.moved`; empty where one of the two is not to be had."""
        try:
            return self._versions.moved(before, after, decayed)
        except VersionGoneError:
            return {}

    def score(self, trajectories: Sequence[Trajectory], options: ScoreOptions) -> _Scores:
        """[T] nats each, 0 where not sampled, NaN where it cannot be known: the version is not to be had (`unknown`
        says why), or nothing precedes the token.

        Every version is put into the module once a call, but with `keep_kv` once a span that follows another version's
        within a generation. Tokens behind a span whose version is unknown are then unknown too, as the cache is.

        Raises:
            UserError: the model cannot do what is asked (routing replay of a dense model).
            ConcordError: a covered row of a routing trace cannot be.
        """
        self._unknown = {}
        self._scored_tokens += sum(trajectory.token_ids.size for trajectory in trajectories)
        if options.replay_routing and self._experts is None:
            raise UserError(
                f"got replay_routing for {self._model.architecture}, whose config names no experts; ask it of a mixture"
                " of experts"
            )
        scores: _Scores = [np.where(t.sampled, np.float32(np.nan), np.float32(0.0)) for t in trajectories]
        plan = self._plan(trajectories, options)
        for policy in sorted(plan.rows, key=lambda policy: (not self._versions.holds(policy), policy)):
            if not self._activate(policy):
                continue
            with self._number_format(options):
                for sampler, rows in plan.rows[policy].items():
                    for batch in batches_of(rows, self._batch_tokens):
                        _write(scores, batch, self._forward(batch, sampler, options))
        for sampler, rows in plan.continued:
            self._score_continued(scores, rows, sampler, options)
        return scores

    def score_with_routing(
        self, trajectories: Sequence[Trajectory], options: ScoreOptions
    ) -> tuple[_Scores, list[RoutingAgreement | None]]:
        """`score`, and how far each trajectory's trace agrees with the experts that this module chooses for the scored
        tokens, each at its own version.

        None where a trajectory has no trace, nothing of it was scored, or the model is dense. Under `replay_routing`
        the experts compared are still those that the routers choose by themselves.

        Raises:
            UserError: as `score`; or a router returns no logits.
        """
        self._listens = True
        try:
            scores = self.score(trajectories, options)
        finally:
            self._listens = False
            agreements = None if self._experts is None else self._experts.listener.take(len(trajectories))
        return scores, agreements or [None] * len(trajectories)

    def score_with_moments(
        self, trajectories: Sequence[Trajectory], options: ScoreOptions
    ) -> tuple[_Scores, list[RoutingAgreement | None], list[NDArray[np.float32]]]:
        """As `MomentRescorer.score_with_moments`, in the same forward passes.

        Raises:
            UserError: as `score_with_routing`.
        """
        moments = [np.full((3, t.token_ids.size), np.nan, dtype=np.float32) for t in trajectories]
        self._moments = moments
        try:
            return *self.score_with_routing(trajectories, options), moments
        finally:
            self._moments = None

    def _plan(self, trajectories: Sequence[Trajectory], options: ScoreOptions) -> _Plan:
        plan = _Plan(rows={}, continued=[])
        for index, trajectory in enumerate(trajectories):
            sampler = Sampler.of(trajectory.tag, options)
            recomputed: list[tuple[VersionSpan, PolicyVersion]] = []
            for generation in generations(self._spans(trajectory, options)):
                if options.keep_kv and len({policy for _, policy in generation}) > 1:
                    plan.continued.append((sampler, continued_rows(index, trajectory, generation)))
                else:
                    recomputed += generation
            for policy, row in prefix_rows(index, trajectory, recomputed).items():
                plan.rows.setdefault(policy, {}).setdefault(sampler, []).append(row)
        return plan

    def _spans(self, trajectory: Trajectory, options: ScoreOptions) -> list[tuple[VersionSpan, PolicyVersion]]:
        """Spans with the policies that shall score them; a version below 0 is unknown."""
        spans: list[tuple[VersionSpan, PolicyVersion]] = []
        unknown_end = -1
        for span in trajectory.version_spans:
            if options.keep_kv and span.start == unknown_end:
                unknown_end = span.end  # its cache is unknown
                continue
            try:
                spans.append((span, self._versions.shifted(span.policy, options.version_offset)))
            except VersionGoneError as error:
                self._unknown[f"{span.policy.key}{options.version_offset:+d}"] = str(error)
                unknown_end = span.end
        return spans

    def _activate(self, policy: PolicyVersion) -> bool:
        try:
            self._versions.activate(policy)
        except VersionGoneError as error:
            self._unknown[policy.key] = str(error)
            return False
        return True

    def _number_format(self, options: ScoreOptions) -> AbstractContextManager[None]:
        convert = conversion(self._model.causal_lm, options, self._versions.dtype)
        return nullcontext() if convert is None else self._versions.converted(convert)

    def _score_continued(
        self, scores: _Scores, rows: Iterable[tuple[PolicyVersion, ScoreRow]], sampler: Sampler, options: ScoreOptions
    ) -> None:
        cache = DynamicCache(config=cast(Any, self._model.causal_lm).config)
        for policy, row in rows:
            if not self._activate(policy):
                return
            batch = padded([row])
            with self._number_format(options):
                _write(scores, batch, self._forward(batch, sampler, options, cache))

    def _forward(
        self, batch: ScoreBatch, sampler: Sampler, options: ScoreOptions, cache: DynamicCache | None = None
    ) -> NDArray[np.float32]:
        """[N] log-probs of the batch's targets under the active weights; a cache is read and extended."""
        token_ids, positions, targets = (
            self._tensor(array) for array in (batch.token_ids, batch.positions, batch.targets)
        )
        with torch.inference_mode(), self._listening(batch), self._routing(batch, options):
            chosen = self._model.chosen_states(token_ids, positions, cache, self._position_ids(batch, options))
            weight, temperature, chunk = self._model.head_weight(), sampler.temperature, self._model.chunk_tokens
            if options.token == "likeliest":
                targets = likeliest_tokens(chosen, weight, chunk)
            head = (chosen, weight, targets)
            support = batch_support(batch, sampler, listed=options.top_p is None and options.top_k is None)
            moments = None if self._moments is None else token_moments(*head, sampler, chunk)
            if options.round_logits and support is None:
                logprobs = rounded_logprobs(*head, temperature, chunk)
            elif moments is None or (support is not None and support.listed.ids.size):
                logprobs, _ = chunked_logprobs(*head, temperature, chunk, support)
            else:
                logprobs = moments[0]
            if self._moments is not None and moments is not None:
                _write(self._moments, batch, moments.cpu().numpy())
        return logprobs.cpu().numpy()

    def _position_ids(self, batch: ScoreBatch, options: ScoreOptions) -> Tensor | None:
        """[B, T] where tokens stand, padding behind their end included; None where none jumps."""
        if not options.jumps:
            return None
        position_ids = np.zeros(batch.token_ids.shape, dtype=np.int64)
        for line, row in zip(position_ids, batch.rows, strict=True):
            first, number = options.jumps[row.index]
            inputs = np.arange(row.start, row.end)
            line[: row.length] = inputs + np.where(inputs >= first, number, 0)
        return self._tensor(position_ids)

    @property
    def routing_cell(self) -> tuple[int, int] | None:
        """(blocks with experts, experts a token) of the model; None for a dense one."""
        return None if self._experts is None else self._experts.cell

    def _listening(self, batch: ScoreBatch) -> AbstractContextManager[None]:
        if not self._listens or self._experts is None:
            return nullcontext()
        return self._experts.listener.listening(batch)

    def _routing(self, batch: ScoreBatch, options: ScoreOptions) -> AbstractContextManager[object]:
        if not options.replay_routing or self._experts is None:
            return nullcontext()
        routing = batch_routing(batch, self._experts.number, self._experts.cell)
        return nullcontext() if routing is None else self._experts.replay.using(*map(self._tensor, routing))

    def _tensor(self, array: NDArray[np.integer[Any]] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(self._device)  # pyright: ignore[reportUnknownMemberType]


def _experts_of(model: PolicyModel) -> _Experts | None:
    """None for a dense model. The listener hears the routers before the replay changes their answer."""
    causal_lm = model.causal_lm
    counts, blocks = expert_counts(model.text_config), len(find_routers(causal_lm))
    if counts is None or not blocks:
        return None
    listener = RoutingListener(causal_lm, *counts)
    return _Experts(counts[0], (blocks, counts[1]), listener, RoutingReplay(causal_lm, *counts))


def _write(found: Sequence[NDArray[np.float32]], batch: ScoreBatch, values: NDArray[np.float32]) -> None:
    """Put [..., N] values of the batch's targets into the [..., T] arrays of their trajectories."""
    ends = np.cumsum([row.targets.size for row in batch.rows])[:-1]
    for row, part in zip(batch.rows, np.split(values, ends, axis=-1), strict=True):
        found[row.index][..., row.targets] = part
