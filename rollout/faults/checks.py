"""What can be said about planted faults from the config alone: those that cannot act, or that would change nothing, are
refused before anything starts."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rollout.config import EngineConfig, SamplingConfig, returns_routing
from rollout.faults.config import (
    FaultConfig,
    FaultsConfig,
    FaultSection,
    KvKeptFault,
    MissingRoutingFault,
    RawLogprobsFault,
    RoutingPerturbedFault,
    SilentTemperatureFault,
    SilentTopPFault,
    StaleHeadFault,
    StaleReplicaFault,
    WeightFault,
)
from rollout.faults.data_config import (
    EasyPromptsFault,
    EvaluationTemplateFault,
    HighLearningRateFault,
    TrainEvalOverlapFault,
)
from rollout.faults.gradient_config import GradientFault, RatioSpikeFault
from rollout.faults.trainer_config import TrainerFault


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSurroundings:
    """What faults are planted into, as far as the config says."""

    engine: EngineConfig
    sampling: SamplingConfig
    deterministic: bool
    disk: bool
    """Weights travel by disk."""
    tied_head: bool | None = None
    """None: only the model's files say."""
    mixture_of_experts: bool | None = None
    """None: only the model's files say."""
    scripted_trainer: bool = False
    ratio_unused: bool = False
    """The loss compares no log-prob with the rollout's: old ones are recomputed, and nothing is corrected."""
    coupled_terms: bool = False
    """A term of the loss depends on the other tokens of its sequence."""
    evaluates: bool = False
    """Held-out prompts are evaluated."""
    sums: bool = True
    """Prompts are sums."""


def check_faults(faults: FaultsConfig, around: FaultSurroundings) -> None:
    """Refuse faults that cannot act.

    Raises:
        ValueError: which fault, why, and what to change; the first problem.
    """
    silent = {f.replica for f in faults.plant if isinstance(f, SilentTemperatureFault | SilentTopPFault)}
    for index, fault in enumerate(faults.plant):
        for problem in (*_problems(fault, around), *_problems_in_engines(fault, around, silent)):
            raise ValueError(f"faults.plant[{index}] ({fault.type}): {problem}")


def _problems(fault: FaultConfig, around: FaultSurroundings) -> Iterator[str]:
    """Why a fault outside engines would do nothing."""
    if isinstance(fault, GradientFault | TrainerFault) and around.scripted_trainer:
        yield "the scripted trainer computes no gradient; set trainer.type = 'fsdp'"
    if isinstance(fault, RatioSpikeFault) and around.ratio_unused:
        yield (
            "consistency.mode = 'gate' recomputes the old log-probs, and without a correction the rollout's are not in "
            "the loss; set consistency.correction.type, such as 'tis', or another mode"
        )
    if isinstance(fault, RatioSpikeFault) and around.coupled_terms:
        yield (
            "the algorithm's ratio is its sequence's, which one token hardly moves; set trainer.algorithm.type to one "
            "whose ratio is the token's, such as 'grpo'"
        )
    if isinstance(fault, EvaluationTemplateFault | TrainEvalOverlapFault) and not around.evaluates:
        yield "nothing is evaluated; set evaluation.every_steps"
    if isinstance(fault, HighLearningRateFault) and around.scripted_trainer:
        yield "the scripted trainer has no optimizer; set trainer.type = 'fsdp'"
    if isinstance(fault, EasyPromptsFault) and not around.sums:
        yield 'it makes sums; set environment.type = "arithmetic"'


def _problems_in_engines(fault: FaultConfig, around: FaultSurroundings, silent: Collection[int]) -> Iterator[str]:
    """Why a fault in an engine would do nothing; `silent` are the replicas that do not sample as asked."""
    engine, sampling, scripted = around.engine, around.sampling, around.engine.type == "scripted"
    if isinstance(fault, FaultSection) and fault.replica >= engine.replicas:
        yield (
            f"got replica = {fault.replica}, but engine.replicas = {engine.replicas}; choose 0 to "
            f"{engine.replicas - 1}, or raise engine.replicas"
        )
    if isinstance(fault, WeightFault) and not around.disk:
        yield "it acts on published files; set weights.transport = 'disk'"
    if isinstance(fault, WeightFault) and scripted and not isinstance(fault, StaleReplicaFault):
        yield "the scripted engine computes with no weights; set engine.type to 'torch' or 'vllm'"
    if isinstance(fault, StaleHeadFault) and around.tied_head:
        yield (
            "the model's head is its embedding, so it cannot stay old alone; set model.tie_embeddings = false, or plant"
            " stale_replica"
        )
    if isinstance(fault, RoutingPerturbedFault) and around.mixture_of_experts is False:
        yield "a dense model routes nothing; set model.moe = true, or use an MoE model"
    if isinstance(fault, KvKeptFault) and scripted:
        yield "the scripted engine has no KV cache; set engine.type to 'torch' or 'vllm'"
    if isinstance(fault, KvKeptFault) and engine.kv_across_versions == "keep":
        yield "the engine keeps its cache and says so, which is no fault; set engine.kv_across_versions = 'recompute'"
    if isinstance(fault, KvKeptFault) and around.deterministic:
        yield (
            "deterministic runs finish running requests before an update, so that no cache is left to keep; set "
            "run.deterministic = false"
        )
    as_drawn = (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    if isinstance(fault, RawLogprobsFault) and as_drawn and fault.replica not in silent:
        yield (
            "raw and processed log-probs are the same at sampling.temperature = 1; set another temperature, such as "
            "0.8, or plant silent_temperature beside it"
        )
    if isinstance(fault, SilentTemperatureFault) and fault.temperature == sampling.temperature:
        yield f"sampling.temperature is {sampling.temperature:g} as well; set another temperature"
    if isinstance(fault, SilentTopPFault) and fault.top_p >= sampling.top_p:
        yield (
            f"got top_p = {fault.top_p:g} with sampling.top_p = {sampling.top_p:g}, which would cut off nothing more; "
            "set a smaller one"
        )
    if isinstance(fault, MissingRoutingFault) and not returns_routing(engine):
        yield "no routing is asked for; set engine.return_routing = true (torch, or vllm on GPU), and use an MoE model"
