"""Config of the search for the token behind a gradient spike. Torch-free; frozen; unknown keys are errors."""

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from rollout.config import Section


class GivenTau(Section):
    """A fixed threshold."""

    type: Literal["given"] = "given"
    tau: float
    """Norm of one token's gradient, before its weight, from which on it is suspicious; N tokens of weight 1/N together: tau / sqrt(N)."""

    @field_validator("tau")
    @classmethod
    def _tau_bounds_something(cls, tau: float) -> float:
        if not (tau > 0 and math.isfinite(tau)):
            raise ValueError(f'got tau = {tau:g}; expected a positive number: a norm of one token\'s gradient, or threshold.type = "calibrated"')
        return tau


class CalibratedTau(Section):
    """A multiple of what steps usually have."""

    type: Literal["calibrated"] = "calibrated"
    multiple: Annotated[float, Field(gt=1)] = 10.0
    """tau is this times the running median of |gradient| / sqrt(sum of squared token weights)."""
    window_steps: PositiveInt = 100
    """Steps in the median."""
    warmup_steps: PositiveInt = 20
    """Steps before the first threshold; until then only what is not finite triggers."""


class GradLocConfig(Section):
    """When a step is searched, how far, and what becomes of what is found."""

    threshold: Annotated[GivenTau | CalibratedTau, Field(discriminator="type")] = CalibratedTau()
    budget_passes: PositiveInt = 64
    """Passes (forward and backward of what is in question) of one search, at most; no less than a step has micro-batches."""
    max_hits: PositiveInt = 8
    """More culprits than this are no culprits: the spike is diffuse."""
    action: Literal["observe", "mask", "skip", "quarantine"] = "observe"
    """What becomes of a located token: nothing, its terms leave the step's loss, the step is not applied, or its trajectory leaves training."""
    suspect_passes: NonNegativeInt = 20
    """Passes in any hundred steps that suspects of the consistency service may cause in steps below the threshold; 0 lets them only order a search."""
    suspect_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Thresholds of suspects are this much of the others'."""
    subtract: bool = True
    """A half's gradient is what the other leaves of the whole's: one pass a level instead of two, for one more gradient in memory. Only without dropout."""
    cut_sequences: bool = True
    """A pass runs only the sequences in question, up to the last token in question. Only without dropout."""
