"""Config of faults planted into the trainer's gradient: which fault, in which steps. Torch-free; it plants nothing."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from rollout.config import Section


class GradientFaultSection(Section):
    """When a fault of a step acts."""

    start_version: Annotated[int, Field(ge=1)] = 1
    """The step that produces this policy version is the first that it acts on."""
    every_steps: NonNegativeInt = 0
    """It acts again every so many versions; 0: once. A step that was not applied and is tried again is not hit
    again."""

    def hits(self, version: int) -> bool:
        """Whether the step that produces `version` is one that it acts on."""
        if not self.every_steps:
            return version == self.start_version
        return version >= self.start_version and (version - self.start_version) % self.every_steps == 0


class GradSpikeFault(GradientFaultSection):
    """The loss term of one token is scaled; its importance ratio stays normal."""

    type: Literal["grad_spike"] = "grad_spike"
    factor: Annotated[float, Field(gt=1)] = 1e4
    """What the term is multiplied by; 1e3 to 1e6 are spikes."""


class TwoSpikesFault(GradientFaultSection):
    """The loss terms of two tokens are scaled, in different micro-batches and, where the step has them, on different
    ranks."""

    type: Literal["two_spikes"] = "two_spikes"
    factor: Annotated[float, Field(gt=1)] = 1e4
    """What each term is multiplied by."""


class DiffuseSpikeFault(GradientFaultSection):
    """Every loss term of the step is scaled: no token is the cause."""

    type: Literal["diffuse_spike"] = "diffuse_spike"
    factor: Annotated[float, Field(gt=1)] = 100.0
    """What each term is multiplied by."""


class NanTokenFault(GradientFaultSection):
    """The loss term of one token is not a number."""

    type: Literal["nan_token"] = "nan_token"


class BlockExplosionFault(GradientFaultSection):
    """The gradient of one transformer block is scaled; those of the others stay."""

    type: Literal["block_explosion"] = "block_explosion"
    block: NonNegativeInt | None = None
    """Number of the transformer block, from 0; none draws one anew for every step that is hit."""
    factor: Annotated[float, Field(gt=1)] = 1e3
    """What the block's gradient is multiplied by."""


class RatioSpikeFault(GradientFaultSection):
    """One rollout log-prob of a token with a negative advantage is shifted, so that its importance ratio explodes."""

    type: Literal["ratio_spike"] = "ratio_spike"
    shift_nats: Annotated[float, Field(lt=0)] = -10.0
    """Added to the log-prob that the engine reported."""


TermFault = GradSpikeFault | TwoSpikesFault | NanTokenFault | RatioSpikeFault
GradientFault = TermFault | DiffuseSpikeFault | BlockExplosionFault
