"""Config of mistakes planted into the trainer: they act in every step from their first on. Torch-free; it plants
nothing."""

from typing import Annotated, Literal

from pydantic import Field

from rollout.config import Section


class TrainerFaultSection(Section):
    """From when on a mistake acts."""

    start_version: Annotated[int, Field(ge=1)] = 1
    """The step that produces this policy version is the first that it acts on."""


class FlippedAdvantagesFault(TrainerFaultSection):
    """Every advantage has the other sign."""

    type: Literal["flipped_advantages"] = "flipped_advantages"


class SwappedAdvantagesFault(TrainerFaultSection):
    """Every trajectory has the advantage of the next one in its micro-batch."""

    type: Literal["swapped_advantages"] = "swapped_advantages"


class FlippedGradientFault(TrainerFaultSection):
    """The loss has the other sign, whatever its terms: what shall fall rises."""

    type: Literal["flipped_gradient"] = "flipped_gradient"


class ShiftedLossMaskFault(TrainerFaultSection):
    """The token before each loss token is in the loss in its place."""

    type: Literal["shifted_loss_mask"] = "shifted_loss_mask"


class ShiftedInputsFault(TrainerFaultSection):
    """The model reads every sequence one position late."""

    type: Literal["shifted_inputs"] = "shifted_inputs"


class TrainerDropoutFault(TrainerFaultSection):
    """A tenth of what each transformer block puts out is dropped, in training alone."""

    type: Literal["trainer_dropout"] = "trainer_dropout"


class FrozenBlockFault(TrainerFaultSection):
    """The middle transformer block gets no gradient; one that has moved before goes on by its momentum for some
    steps."""

    type: Literal["frozen_block"] = "frozen_block"


class LostUpdateFault(TrainerFaultSection):
    """The optimizer moves nothing: its learning rate is 0, whatever the config says."""

    type: Literal["lost_update"] = "lost_update"


TrainerFault = (
    FlippedAdvantagesFault
    | SwappedAdvantagesFault
    | FlippedGradientFault
    | ShiftedLossMaskFault
    | ShiftedInputsFault
    | TrainerDropoutFault
    | FrozenBlockFault
    | LostUpdateFault
)
