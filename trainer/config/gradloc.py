"""Config of the search for the token behind a gradient spike. Torch-free; frozen; unknown keys are errors."""

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

from rollout.config import Section


class GivenTau(Section):
    """A fixed threshold."""

    type: Literal["given"] = "given"
    tau: float
    """Norm of one token's gradient, before its weight, from which on it is suspicious; N tokens of weight 1/N together:
    tau / sqrt(N)."""

    @field_validator("tau")
    @classmethod
    def _tau_bounds_something(cls, tau: float) -> float:
        if not (tau > 0 and math.isfinite(tau)):
            raise ValueError(
                f"got tau = {tau:g}; expected a positive number: a norm of one token's gradient, or threshold.type ="
                ' "calibrated"'
            )
        return tau


class CalibratedTau(Section):
    """A multiple of what steps usually have."""

    type: Literal["calibrated"] = "calibrated"
    multiple: Annotated[float, Field(gt=1)] = 10.0
    """tau is this times the running median of |gradient| / sqrt(sum of squared token weights)."""
    window_steps: PositiveInt = 100
    """Steps in the median; those without a gradient are not among them."""
    warmup_steps: PositiveInt = 20
    """Steps before the first threshold; until then only what is not finite triggers."""


class GradLocConfig(Section):
    """When a step is searched for the tokens behind its gradient's norm, how far, and what becomes of what is found.
    The scripted trainer has no gradient."""

    enabled: bool = True
    """False never searches."""
    threshold: Annotated[GivenTau | CalibratedTau, Field(discriminator="type")] = CalibratedTau()
    scale_floor: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """A block that `trainer.optimizer.clip` (layerclip or adagc) is about to scale below this triggers too, whatever
    the global norm; 0 never does."""
    budget_passes: PositiveInt | None = None
    """Passes (forward and backward of what is in question) of one search, at most. Fewer than the first step has
    micro-batches end the run there; a later step that has more is searched as far as they reach. None: 64, or twice the
    micro-batches where that is more."""
    max_hits: PositiveInt = 8
    """More culprits than this are no culprits: the spike is diffuse."""
    action: Literal["observe", "mask", "skip", "quarantine"] = "observe"
    """What becomes of located tokens. observe: nothing. mask: the step is computed again without their terms, with the
    same denominators. skip: the step is not applied. quarantine: as mask for the whole trajectory, which is out of
    training for good."""
    spike_passes: PositiveInt | None = None
    """Passes in any hundred steps that the triggers `threshold` and `scale` may cause before steps with a spike are no
    longer searched: their outcome is `not_searched`, and they are applied as they are. A search that has begun is not
    cut short. None: ten searches that take all of their passes. What is not finite is always searched."""
    suspect_passes: NonNegativeInt = 20
    """Passes in any hundred steps that suspects of the consistency service may cause in steps below the threshold; 0
    lets them only order a search."""
    suspect_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Suspects may start a search of their own in a step above this much of its threshold, and their thresholds in it
    are this much of the others'."""
    cut_sequences: bool = True
    """A pass runs only the sequences in question, up to the last token in question. Only without dropout."""
    part_norms: bool = True
    """Norms of each rank's part of each micro-batch are taken in every backward pass, so that a search needs no pass
    over micro-batches and ranks."""
    term_pulls: bool = True
    """How hard each token term pulls at its own log-prob is taken in every backward pass, and a search first looks at
    those that pull hardest."""
    token_ratio_bounds: tuple[NonNegativeFloat, NonNegativeFloat] = (0.5, 2.0)
    """A culprit whose importance ratio pi_now / pi_rollout is outside is a token mismatch (A1)."""
    sequence_ratio_bounds: tuple[NonNegativeFloat, NonNegativeFloat] = (0.9, 1.1)
    """Else one whose sequence has a geometric mean of these ratios outside is a sequence mismatch (A2)."""
    block_factor: Annotated[float, Field(gt=1)] = 10.0
    """Else one whose gradient in some block is above this multiple of the block's usual norm, while half of the blocks
    are not, is block heterogeneity (B)."""

    @field_validator("token_ratio_bounds", "sequence_ratio_bounds")
    @classmethod
    def _bounds_hold_the_ratio_of_agreement(cls, bounds: tuple[float, float]) -> tuple[float, float]:
        low, high = bounds
        if not low < 1.0 < high:
            raise ValueError(
                f"got [{low:g}, {high:g}]; expected a bound below 1 and one above, for example [0.5, 2.0]: a ratio of 1"
                " is agreement"
            )
        return bounds
