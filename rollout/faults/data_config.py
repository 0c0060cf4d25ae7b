"""Config of faults planted into data, rewards and evaluations, and into the learning rate: they have no replica.
Torch-free; it plants nothing."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from rollout.config import Section


class RewardFaultSection(Section):
    """Which trajectories a fault of the reward acts on. Evaluations judge by the reward as it should be."""

    start_version: Annotated[int, Field(ge=0)] = 1
    """It acts on trajectories whose newest token was sampled under this policy version or a later one."""
    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of trajectories (of dispatches, where a worker dies) that it acts on, drawn from a seeded hash of their
    ids."""


class LengthRewardFault(RewardFaultSection):
    """The reward grows with the length of the answer."""

    type: Literal["length_reward"] = "length_reward"
    per_token: PositiveFloat = 1.0
    """Added for each sampled token; the reward has a part `planted_length` that says how much it came to."""


class RewardFlipFault(RewardFaultSection):
    """The reward is one minus what it should be: wrong answers are rewarded."""

    type: Literal["reward_flip"] = "reward_flip"


class DeadRewardWorkerFault(RewardFaultSection):
    """The process of the reward worker ends while it judges."""

    type: Literal["dead_reward_worker"] = "dead_reward_worker"
    rate: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Share of dispatches at which it dies, drawn from a seeded hash of their ids: another attempt at the same prompt
    may live."""


class EvaluationTemplateFault(Section):
    """Evaluations render their prompts with another template than before; nothing says so but the fingerprint."""

    type: Literal["eval_template_changed"] = "eval_template_changed"
    start_version: Annotated[int, Field(ge=1)] = 1
    """It acts on evaluations of this policy version and of later ones."""


class TrainEvalOverlapFault(Section):
    """Held-out prompts are among the training prompts. Set `evaluation.max_overlap` above their share, or the run does
    not start."""

    type: Literal["train_eval_overlap"] = "train_eval_overlap"
    rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the training prompts that are replaced, drawn from a seeded hash of their ids."""


class EasyPromptsFault(Section):
    """All training prompts are sums below ten, which are solved soon; the evaluation's are not. Needs environment.type
    = "arithmetic"."""

    type: Literal["easy_prompts"] = "easy_prompts"


class HighLearningRateFault(Section):
    """The optimizer steps with a multiple of the learning rate that the config asks for; the reports say what it
    used."""

    type: Literal["high_lr"] = "high_lr"
    start_version: Annotated[int, Field(ge=1)] = 1
    """The step that produces this policy version is the first that it acts on."""
    factor: Annotated[float, Field(gt=1)] = 30.0
    """What the learning rate is multiplied by."""


RewardFault = LengthRewardFault | RewardFlipFault | DeadRewardWorkerFault
SourceFault = TrainEvalOverlapFault | EasyPromptsFault
DataFault = RewardFault | SourceFault | EvaluationTemplateFault | HighLearningRateFault
