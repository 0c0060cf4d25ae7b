"""The trainer's stages of the one-way chain: audited group, training sample, micro-batch, step report."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import RoutingTrace
from rollout.types.weights import PolicyVersion
from trainer.types.gradloc import GradLocEvidence, Quarantined
from trainer.types.histograms import BucketCounts
from trainer.types.support import Truncation


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
class TrainingSample:
    """One trajectory as the loss sees it. Arrays are token-aligned: entry t belongs to token t, whose logits come from
    position t - 1."""

    trajectory_id: str
    token_ids: NDArray[np.int32]
    """[T]"""
    loss_mask: NDArray[np.bool_]
    """[T], True where the token's term is in the loss; never at 0."""
    old_logprobs: NDArray[np.float32]
    """[T] nats, 0 outside the mask."""
    old_logprob_source: OldLogprobSource
    rollout_logprobs: NDArray[np.float32]
    """[T] nats, as the engine logged them; 0 outside the mask."""
    advantages: NDArray[np.float32]
    """[T] of each token; alike where the algorithm gives one for the whole trajectory."""
    token_weight: float
    """Weight of each of its terms in the loss: the fixed denominator (1/N or 1/(S n))."""
    suspects: tuple[int, ...] = ()
    """Positions that the consistency service found suspect: GradLoc looks there first."""
    routing: RoutingTrace | None = None
    """The experts that the engine chose."""
    truncation: Truncation | None = None
    """How its draws were truncated; None: not at all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Right-padded rows; causal attention needs no padding mask, since real tokens only look left."""

    token_ids: NDArray[np.int64]
    """[B, T]"""
    loss_mask: NDArray[np.bool_]
    """[B, T]"""
    old_logprobs: NDArray[np.float32]
    """[B, T]"""
    rollout_logprobs: NDArray[np.float32]
    """[B, T]"""
    advantages: NDArray[np.float32]
    """[B, T]"""
    token_weights: NDArray[np.float32]
    """[B]"""
    trajectory_ids: tuple[str, ...]
    """[B]; empty string for a filler row that keeps ranks in step."""
    lengths: tuple[int, ...]
    """[B] tokens of each row; 0 for a filler."""
    routing: tuple[RoutingTrace | None, ...]
    """[B] the experts that the engine chose; laid out for the model only where they are replayed."""
    truncations: tuple[Truncation | None, ...] = ()
    """[B] how the draws of each row were truncated; empty: none of any."""


StepBatches = Sequence[Sequence[MicroBatch]]
"""[ranks][micro-batches] of one step."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTokens:
    """What one trajectory had in the loss of a step."""

    trajectory_id: str
    positions: NDArray[np.int64]
    """[n] places of the tokens in their trajectory."""
    logprobs: NDArray[np.float32]
    """[n] nats, by the trainer's own forward pass before the update."""
    advantages: NDArray[np.float32]
    """[n] as the loss used them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """What one optimizer step shall do, besides the groups themselves."""

    policy: PolicyVersion
    """The policy that the step produces."""
    oldest_version: int
    """Tokens sampled under an older version leave the loss (max_staleness, policy `mask`)."""
    old_logprobs: OldLogprobSource = OldLogprobSource.ROLLOUT
    """One source for all samples of the step."""
    audited: frozenset[str] = field(default=frozenset())
    """Trajectories whose tokens the report shall hold (`StepReport.audited`): a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedFault:
    """A gradient fault that was planted into a step, or could not be."""

    fault: str
    """Its type."""
    factor: float | None = None
    """What was multiplied, or of `ratio_spike` added in nats; None where the term is not a number."""
    trajectory_id: str = ""
    """Whose token was hit; empty where it was no single token."""
    position: int | None = None
    """Place of the token in its trajectory."""
    micro_batch: int | None = None
    rank: int | None = None
    block: str = ""
    """Whose gradient was scaled."""
    missed: str = ""
    """Why nothing was planted, else empty."""


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
    policy_entropy: float = 0.0
    """Mean over the loss's tokens, nats."""
    clip_fraction_low: float = 0.0
    clip_fraction_high: float = 0.0
    approx_kl: float = 0.0
    """Mean k3 of old against new log-probs, nats."""
    mean_abs_logprob_difference: float = 0.0
    """Mean |log pi_now - old log-prob| over the loss's tokens, nats: staleness alone where the old log-probs were
    recomputed, else staleness and engine."""
    reference_kl: float = 0.0
    """Mean of the configured estimator; 0 without a reference."""
    advantage_std: float = 0.0
    trained_ids: frozenset[str]
    """Trajectories with at least one term in the loss."""
    masked_ids: frozenset[str] = field(default=frozenset())
    """Trajectories that lost some tokens, or all, to the staleness mask, a verdict or the gradient search."""
    zero_variance_groups: int = 0
    """Groups whose advantages are all 0."""
    dropped_groups: frozenset[str] = field(default=frozenset())
    """Dispatches of them that were left out of the step (`trainer.algorithm.zero_variance_groups = "drop"`)."""
    sample_repeats: float = 0.0
    """Share of pairs of samples of one group that have the same sampled tokens."""
    sample_repeats_expected: float = 0.0
    """The same, as independent samples would have it: the mean probability of a sample."""
    phases_s: tuple[tuple[str, float], ...] = ()
    """(phase, seconds): decode, pack, forward_backward, gradloc (with the repetition of the step, if any),
    optimizer."""
    skipped: str = ""
    """Reason why no step was applied (non-finite loss, gradient or update, or a spike under `trainer.gradloc.action =
    "skip"`), else empty."""
    gradloc: GradLocEvidence | None = None
    """What the search for the tokens behind the step's gradient found; None where nothing asked for one."""
    quarantined: tuple[Quarantined, ...] = ()
    """Groups that lost trajectories for good because of it."""
    quarantined_groups: frozenset[str] = field(default=frozenset())
    """Dispatches of the step with a trajectory that is quarantined, because of it or from before."""
    block_norms: tuple[tuple[str, float], ...] = ()
    """(block, L2 norm of its gradient before any clip), in the order of the model."""
    block_scales: tuple[tuple[str, float], ...] = ()
    """(block, factor of its gradient by `trainer.optimizer.clip`), without the global clip; empty where no step was
    applied."""
    block_thresholds: tuple[tuple[str, float | None], ...] = ()
    """(block, norm at which `trainer.optimizer.clip` clips it); None where it has none of its own, or none yet; empty
    where no step was applied."""
    probes: tuple[tuple[str, str, float], ...] = ()
    """(probe, block, value) of the probes of `trainer.probes` that are on."""
    attention_logits: tuple[tuple[str, tuple[float, ...]], ...] = ()
    """(block, largest attention logit of each head before the clip) with `trainer.optimizer.qk_clip`, else empty."""
    statistics: tuple[tuple[str, float], ...] = ()
    """(name, mean over the loss's tokens) of what the algorithm measures (`Algorithm.statistics`), in its order."""
    reward_parts: tuple[tuple[str, float], ...] = ()
    """(part, mean over the trajectories whose reward has it) of the named parts of the rewards."""
    reference_kls: tuple[tuple[str, float], ...] = ()
    """(estimator, mean over the loss's tokens in nats), k1 and k3; empty without a reference."""
    log_ratios: tuple[tuple[str, BucketCounts], ...] = ()
    """(part, log-ratios of the loss's tokens by the buckets of `trainer.types.histograms.LOG_RATIO_EDGES`): log pi_now
    - rollout log-prob (`total`), and where old log-probs were recomputed its parts recomputed - rollout (`engine`) and
    log pi_now - recomputed (`stale`)."""
    mean_abs_rollout_difference: float = 0.0
    """Mean |log pi_now - rollout log-prob| over the loss's tokens, nats: |d_total|."""
    mean_abs_engine_difference: float = 0.0
    """Mean |old log-prob - rollout log-prob| over the loss's tokens, nats: |d_engine| where the old log-probs were
    recomputed, else 0."""
    correction_weight_mean: float = 1.0
    """Mean importance weight of the loss's tokens, after the correction."""
    correction_ess: float = 1.0
    """Effective sample size of these weights, as a fraction of the tokens."""
    correction_zero_fraction: float = 0.0
    """Share of the loss's tokens whose weight is 0."""
    old_logprob_source: OldLogprobSource = OldLogprobSource.ROLLOUT
    routing_replayed_fraction: float = 0.0
    """Share of the inputs that predict something whose experts were the engine's; 0 without a replay."""
    routing_fallback_fraction: float = 0.0
    """Share of them whose experts were the trainer's own although a replay was asked for: the engine's are missing or
    hollow; 0 without a replay."""
    audited: tuple[TrainedTokens, ...] = ()
    """Of the trajectories that the request names, those that were in the loss."""
    planted: tuple[PlantedFault, ...] = ()
    """Gradient faults of `[faults]` that the step was due."""
    saved: str = ""
    """Folder in `saved_steps` that holds the step's batch, else empty."""
    not_saved: str = ""
    """Why the batch of a step that was to be kept is not, else empty."""
    saves_removed: tuple[str, ...] = ()
    """Older folders there that made room for it."""
