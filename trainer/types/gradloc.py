"""What a gradient search leaves for people and for the driver: culprits with everything known of them. Torch-free.
Layer 3 of diagnosis."""

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from rollout.types.weights import PolicyVersion


class Outcome(StrEnum):
    """What becomes of a step that asks for a search."""

    LOCATED = "located"
    """At most `max_hits` tokens, and no more than half of the step's unless it is one, explain at least half of the
    squared norm, and what is left is below its threshold."""
    DIFFUSE = "diffuse"
    """No few tokens dominate."""
    INCONCLUSIVE = "inconclusive"
    """The passes ended before the search did, or only suspects were looked at."""
    CLEAN = "clean"
    """Every token was ruled out."""
    NOT_SEARCHED = "not_searched"
    """The passes that spikes may cost in a hundred steps are spent."""


class CulpritType(StrEnum):
    """What is odd about a culprit, in the order in which it is asked."""

    TOKEN_MISMATCH = "A1"
    """Its importance ratio is outside the bounds: engine and trainer, or old and new policy, disagree about this
    token."""
    SEQUENCE_MISMATCH = "A2"
    """Its own ratio is not, but the geometric mean over its sequence is."""
    BLOCK_HETEROGENEITY = "B"
    """The ratios are in bounds; its gradient in some block is far above the block's own history, while half of the
    blocks are not."""
    UNCLASSIFIED = "unclassified"
    """None of these, or too little is known."""


class Acted(StrEnum):
    """What became of a searched step."""

    NOTHING = "nothing"
    """It was applied as it was, if it could be: nothing was located, or the action is observe."""
    MASKED = "masked"
    """It was computed again without the culprits' terms."""
    SKIPPED = "skipped"
    """It was not applied."""
    QUARANTINED = "quarantined"
    """It was computed again without the culprits' trajectories, which are out of training for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """One token term that a search found, under the weights that the step started from."""

    token_id: int
    position: int
    """In its trajectory."""
    trajectory_id: str
    dispatch_id: str
    policy: PolicyVersion
    """That sampled it."""
    replica: int
    """That sampled it."""
    context_token_ids: tuple[int, ...]
    """The token with up to 20 on either side."""
    context_start: int
    """Position of the first of them."""
    type: CulpritType
    norm: float
    """L2 norm of the gradient of this term alone, weight included."""
    block_norms: tuple[tuple[str, float], ...]
    """(block, norm) of the same gradient, in the order of the model."""
    block_ratios: tuple[tuple[str, float], ...]
    """(block, that norm over the usual norm of the block in a whole step); empty before the trainer has seen enough
    steps."""
    logprob: float
    """The trainer's, nats, at the sampling temperature."""
    rollout_logprob: float
    """The engine's, nats."""
    old_logprob: float
    """What the surrogate started from, nats: the engine's, or the recomputed one."""
    d_engine: float | None
    """log pi at the version that sampled it, by the trainer, minus the engine's, nats; None where the token was not
    scored."""
    d_stale: float | None
    """log pi now minus log pi at the version that sampled it, nats; None where the token was not scored."""
    omega: float
    """Importance ratio pi_now / pi_rollout = exp(d_engine + d_stale), before any correction bounds it."""
    sequence_ratio: float
    """Geometric mean of the same over the loss tokens of its trajectory."""
    advantage: float
    entropy: float
    """Entropy of the distribution that the token was sampled from, by the trainer, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchFacts:
    """One search, or one that was asked for and not made. Numbers run over all ranks."""

    outcome: Outcome
    trigger: str
    """non_finite, threshold, scale or suspects."""
    grad_norm: float
    """Norm of the gradient of the step as it was searched, unclipped."""
    threshold: float
    """Norm above which a step is searched; NaN before the calibration has one."""
    tau: float
    """Norm of one token's gradient, before its weight, that the search called suspicious: with trigger `scale` the
    lower of tau and what makes the whole step suspicious. NaN where it looked for what is not finite and none was
    known."""
    explained: float = math.nan
    """Share of the squared norm that goes with what was found; NaN where that was not measured."""
    passes: int = 0
    """Passes that the search took, without the repetition of the step."""
    tokens_forwarded: int = 0
    """Tokens that the search ran through the model, padding included."""
    seconds: float = 0.0
    """Time of the search, and of reading the culprits where there are any."""

    def facts(self) -> dict[str, Any]:
        """These fields by name, for a record that knows more."""
        return {field.name: getattr(self, field.name) for field in fields(SearchFacts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GradLocEvidence(SearchFacts):
    """What a step's search found, and what became of the step."""

    action: str
    """`trainer.gradloc.action`."""
    acted: Acted
    loss: float
    """Loss of the step as it was searched."""
    culprits: tuple[Culprit, ...]
    """In the order found; only with outcome located are they the cause."""
    removed_terms: int = 0
    """Token terms that left the loss."""
    grad_norm_after: float | None = None
    """Norm of the gradient of the step that was computed again, unclipped; None where none was."""

    @property
    def exceeds_after(self) -> bool:
        """Whether the repeated step is still above the threshold (or not finite). It is not searched a second time."""
        return (
            self.grad_norm_after is not None
            and not self.grad_norm_after <= self.threshold
            and self.threshold == self.threshold
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantined:
    """A group that lost trajectories for good."""

    dispatch_id: str
    trajectory_ids: tuple[str, ...]
    verdict: bytes
    """The group's new `verdict` annotation, so that no later lease trains on them."""
