"""The trainer's stages of the one-way chain: audited group, training sample, micro-batch, step report."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rollout.trajectory import TrajectoryGroup
from rollout.weights import PolicyVersion


class Verdict(StrEnum):
    """What may be done with a trajectory."""

    ACCEPT = "accept"
    MASK = "mask"
    """Some tokens leave the loss."""
    REJECT = "reject"
    QUARANTINE = "quarantine"
    """Out of training, kept on disk with its evidence; the prompt comes again."""


class OldLogprobSource(StrEnum):
    """Where a sample's old log-probs come from."""

    ROLLOUT = "rollout"
    """The engine's, as logged."""
    RECOMPUTED = "recomputed"
    """The trainer's numerics at the version that sampled the token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AuditedGroup:
    """A group with one verdict a trajectory."""

    group: TrajectoryGroup
    verdicts: tuple[Verdict, ...]

    def __post_init__(self) -> None:
        if len(self.verdicts) != len(self.group.trajectories):
            raise ValueError(f"group {self.group.dispatch_id}: {len(self.verdicts)} verdicts for {len(self.group.trajectories)} trajectories")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingSample:
    """One trajectory as the loss sees it. Arrays are token-aligned: entry t belongs to token t, whose logits come from position t - 1."""

    trajectory_id: str
    token_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T], True where the token's term is in the loss; never at 0."""
    old_logprobs: NDArray[np.float32]
    """[T] nats, 0 outside the mask."""
    old_logprob_source: OldLogprobSource
    advantage: float
    token_weight: float
    """Weight of each of its terms in the loss: the fixed denominator (1/N or 1/(S n))."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Right-padded rows; causal attention needs no padding mask, since real tokens only look left."""

    token_ids: NDArray[np.int64]
    """[B, T]"""
    loss_mask: NDArray[np.bool_]
    """[B, T]"""
    old_logprobs: NDArray[np.float32]
    """[B, T]"""
    advantages: NDArray[np.float32]
    """[B]"""
    token_weights: NDArray[np.float32]
    """[B]"""
    trajectory_ids: tuple[str, ...]
    """[B]; empty string for a filler row that keeps ranks in step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """What one optimizer step shall do, besides the groups themselves."""

    policy: PolicyVersion
    """The policy that the step produces."""
    oldest_version: int
    """Tokens sampled under an older version leave the loss (max_staleness, policy `mask`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one optimizer step did. Sums run over all ranks."""

    policy: PolicyVersion
    loss: float
    grad_norm: float
    """Global L2 norm before the clip."""
    learning_rate: float
    num_tokens: int
    """Terms in the loss."""
    num_tokens_forwarded: int
    """Padding included."""
    num_micro_batches: int
    """Per rank."""
    policy_entropy: float
    """Mean over the loss's tokens, nats."""
    clip_fraction_low: float
    clip_fraction_high: float
    approx_kl: float
    """Mean k3 of old against new log-probs, nats."""
    mean_abs_logprob_difference: float
    """Mean |log pi_now - old log-prob| over the loss's tokens, nats."""
    reference_kl: float
    """Mean of the configured estimator; 0 without a reference."""
    advantage_std: float
    trained_ids: frozenset[str]
    """Trajectories with at least one term in the loss."""
    masked_ids: frozenset[str] = field(default=frozenset())
    """Trajectories that lost some tokens, or all, to the staleness mask or a verdict."""
    zero_variance_groups: int = 0
    """Groups whose rewards are all alike: in the denominators, without a gradient."""
    phases_s: tuple[tuple[str, float], ...] = ()
    """(phase, seconds): decode, pack, forward_backward, optimizer."""
    skipped: str = ""
    """Reason why no step was applied (non-finite gradient), else empty."""
