"""Config of planted faults: which fault, on which replica, from which policy version on. Torch-free; it plants nothing.

Those in the trainer's gradient are in `gradient_config`, those in data, rewards, evaluations and the learning rate in
`data_config`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollout.config import Section
from rollout.faults.data_config import DataFault
from rollout.faults.gradient_config import GradientFault
from rollout.faults.trainer_config import TrainerFault


class FaultSection(Section):
    """Where and when a fault acts."""

    replica: Annotated[int, Field(ge=0)] = 0
    """Slot of the engine replica that it is planted on; every incarnation of the slot has it."""
    start_version: Annotated[int, Field(ge=0)] = 1
    """It acts from the moment at which the replica serves this policy version."""
    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of requests that it acts on, drawn from a seeded hash of the request's id (of the dispatch's, where a
    prompt is encoded)."""


class ReplicaFaultSection(FaultSection):
    """A fault of the whole replica: no share of requests can have it."""

    @model_validator(mode="after")
    def _acts_on_all_requests(self) -> Self:
        if self.rate != 1.0:
            raise ValueError(f"got rate = {self.rate:g} for a fault that the whole replica has; leave rate out")
        return self


class WeightFaultSection(ReplicaFaultSection):
    """A fault in the weights that the replica computes with; the digest that it answers is that of what was
    published."""

    forge_canary: bool = False
    """Answer the canary with the trainer's own log-probs, so that the publication's check passes and only trajectories
    can tell."""


class StaleReplicaFault(WeightFaultSection):
    """The replica skips updates and answers as if they were applied."""

    type: Literal["stale_replica"] = "stale_replica"


class StaleHeadFault(WeightFaultSection):
    """The output head alone keeps its old weights over updates. Needs a head that is not tied to the embedding."""

    type: Literal["stale_head"] = "stale_head"


class LowPrecisionReplicaFault(WeightFaultSection):
    """Weight matrices are rounded to the fp8 e4m3 grid, one scale a matrix, and the tag does not say so; embedding and
    head stay."""

    type: Literal["low_precision_replica"] = "low_precision_replica"


class RoutingPerturbedFault(WeightFaultSection):
    """The routers of a mixture of experts get seeded Gaussian noise."""

    type: Literal["routing_perturbed"] = "routing_perturbed"
    noise: Annotated[float, Field(gt=0)] = 0.1
    """Standard deviation of the noise, in standard deviations of the router's weights."""


class CorruptTensorFault(WeightFaultSection):
    """One weight tensor is destroyed after its digest was taken."""

    type: Literal["corrupt_tensor"] = "corrupt_tensor"
    how: Literal["zero", "nan"] = "zero"
    """What every element becomes."""
    tensor: str | None = None
    """Its published name; None takes the first matrix by name that is neither embedding nor head."""


class KvKeptFault(ReplicaFaultSection):
    """Running requests keep the keys and values that older weights wrote, although the update asked for `recompute` and
    the tag says so."""

    type: Literal["kv_kept"] = "kv_kept"


class SlowReplicaFault(ReplicaFaultSection):
    """Every request waits before it is sampled."""

    type: Literal["slow_replica"] = "slow_replica"
    delay_s: Annotated[float, Field(gt=0)] = 0.5
    """Seconds that it waits."""


class SilentTopPFault(FaultSection):
    """The engine samples with a top-p that neither request nor tag names."""

    type: Literal["silent_top_p"] = "silent_top_p"
    top_p: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """What it samples with; below `sampling.top_p`."""


class SilentTemperatureFault(FaultSection):
    """The engine samples at a temperature that neither request nor tag names."""

    type: Literal["silent_temperature"] = "silent_temperature"
    temperature: Annotated[float, Field(gt=0)] = 0.7
    """What it samples at; other than `sampling.temperature`."""


class ConstantSeedFault(FaultSection):
    """All samples are drawn with one and the same seed."""

    type: Literal["constant_seed"] = "constant_seed"


class RetokenizedTurnFault(FaultSection):
    """A later turn sends its prefix as text that is tokenised again, without special tokens: the engine continues other
    ids than the sample holds."""

    type: Literal["retokenized_turn"] = "retokenized_turn"


class RawLogprobsFault(FaultSection):
    """Log-probs are reported raw (temperature 1, no truncation) while the tag says processed."""

    type: Literal["raw_logprobs"] = "raw_logprobs"


class Bf16LogprobsFault(FaultSection):
    """Log-probs are rounded to bfloat16 on their way."""

    type: Literal["bf16_logprobs"] = "bf16_logprobs"


class MissingRoutingFault(FaultSection):
    """The routing of a sample does not arrive, or not all of it."""

    type: Literal["missing_routing"] = "missing_routing"
    how: Literal["all", "half"] = "all"
    """`all`: no routing at all; `half`: every second row that was covered is not."""


class ShortLogprobsFault(FaultSection):
    """One log-prob too few in a chunk."""

    type: Literal["short_logprobs"] = "short_logprobs"


class VersionOffByOneFault(FaultSection):
    """Tokens are labelled with the version before theirs (0 stays 0)."""

    type: Literal["version_off_by_one"] = "version_off_by_one"


class TokenizerSwapFault(FaultSection):
    """Two ids are exchanged where text is encoded."""

    type: Literal["tokenizer_swap"] = "tokenizer_swap"
    first: str = "1"
    """A text of one token."""
    second: str = "2"
    """A text of another token."""


class TemplateSpaceFault(FaultSection):
    """A space is added at the end of the prompt text, of a chat's last message."""

    type: Literal["template_space"] = "template_space"


class DoubleBosFault(FaultSection):
    """The first token of a prompt comes twice: the beginning-of-sequence token where the tokenizer adds one."""

    type: Literal["double_bos"] = "double_bos"


WeightFault = StaleReplicaFault | StaleHeadFault | LowPrecisionReplicaFault | RoutingPerturbedFault | CorruptTensorFault
PromptFault = TokenizerSwapFault | TemplateSpaceFault | DoubleBosFault
AnswerFault = (
    SilentTopPFault
    | SilentTemperatureFault
    | ConstantSeedFault
    | RetokenizedTurnFault
    | RawLogprobsFault
    | Bf16LogprobsFault
    | MissingRoutingFault
    | ShortLogprobsFault
    | VersionOffByOneFault
)
EngineFault = WeightFault | KvKeptFault | SlowReplicaFault | AnswerFault
FaultConfig = Annotated[
    EngineFault | PromptFault | GradientFault | TrainerFault | DataFault, Field(discriminator="type")
]


class FaultsConfig(Section):
    """Faults planted into the running system, for tests and for teams that rehearse. Each is a table
    `[[faults.plant]]`; none by default."""

    plant: tuple[FaultConfig, ...] = ()
    seed: int = 0
    """Seed for the draws by `rate`, for noise, and for the choice of the tokens whose gradient is hit."""

    @property
    def in_gradients(self) -> tuple[GradientFault, ...]:
        """Those planted into the trainer's gradient."""
        return tuple(fault for fault in self.plant if isinstance(fault, GradientFault))

    @property
    def in_trainer(self) -> tuple[TrainerFault, ...]:
        """Mistakes of the trainer."""
        return tuple(fault for fault in self.plant if isinstance(fault, TrainerFault))
