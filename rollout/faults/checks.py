"""What can be said about planted faults from the config alone: those that cannot act, or that would change nothing, are
refused before anything starts."""

from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Any

from rollout.config import EngineConfig, SamplingConfig, returns_routing
from rollout.faults.config import (
    FaultsConfig,
    FaultSection,
    KvKeptFault,
    MissingRoutingFault,
    RawLogprobsFault,
    RoutingPerturbedFault,
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
    evaluates: bool = False
    """Held-out prompts are evaluated."""
    sums: bool = True
    """Prompts are sums."""

    @property
    def last_slot(self) -> int:
        """Of the engine replicas."""
        return self.engine.replicas - 1


_PROBLEMS: tuple[tuple[type | UnionType, Callable[[Any, FaultSurroundings], bool], str], ...] = (
    (
        GradientFault,
        lambda _, around: around.scripted_trainer,
        "the scripted trainer computes no gradient; set trainer.type = 'fsdp'",
    ),
    (
        RatioSpikeFault,
        lambda _, around: around.ratio_unused,
        "consistency.mode = 'gate' recomputes the old log-probs, and without a correction the rollout's are not in the "
        "loss; set consistency.correction.type, such as 'tis', or another mode",
    ),
    (
        EvaluationTemplateFault | TrainEvalOverlapFault,
        lambda _, around: not around.evaluates,
        "nothing is evaluated; set evaluation.every_steps",
    ),
    (
        HighLearningRateFault,
        lambda _, around: around.scripted_trainer,
        "the scripted trainer has no optimizer; set trainer.type = 'fsdp'",
    ),
    (EasyPromptsFault, lambda _, around: not around.sums, 'it makes sums; set environment.type = "arithmetic"'),
    (
        FaultSection,
        lambda fault, around: fault.replica > around.last_slot,
        "got replica = {fault.replica}, but engine.replicas = {around.engine.replicas}; choose 0 to {around.last_slot},"
        " or raise engine.replicas",
    ),
    (WeightFault, lambda _, around: not around.disk, "it acts on published files; set weights.transport = 'disk'"),
    (
        WeightFault,
        lambda fault, around: around.engine.type == "scripted" and not isinstance(fault, StaleReplicaFault),
        "the scripted engine computes with no weights; set engine.type to 'torch' or 'vllm'",
    ),
    (
        StaleHeadFault,
        lambda _, around: bool(around.tied_head),
        "the model's head is its embedding, so it cannot stay old alone; set model.tie_embeddings = false, or plant "
        "stale_replica",
    ),
    (
        RoutingPerturbedFault,
        lambda _, around: around.mixture_of_experts is False,
        "a dense model routes nothing; set model.moe = true, or use an MoE model",
    ),
    (
        KvKeptFault,
        lambda _, around: around.engine.type == "scripted",
        "the scripted engine has no KV cache; set engine.type to 'torch' or 'vllm'",
    ),
    (
        KvKeptFault,
        lambda _, around: around.engine.kv_across_versions == "keep",
        "the engine keeps its cache and says so, which is no fault; set engine.kv_across_versions = 'recompute'",
    ),
    (
        KvKeptFault,
        lambda _, around: around.deterministic,
        "deterministic runs finish running requests before an update, so that no cache is left to keep; set "
        "run.deterministic = false",
    ),
    (
        RawLogprobsFault,
        lambda _, around: (around.sampling.temperature, around.sampling.top_p, around.sampling.top_k) == (1.0, 1.0, 0),
        "raw and processed log-probs are the same at sampling.temperature = 1; set another temperature, such as 0.8",
    ),
    (
        SilentTopPFault,
        lambda fault, around: fault.top_p >= around.sampling.top_p,
        "got top_p = {fault.top_p:g} with sampling.top_p = {around.sampling.top_p:g}, which would cut off nothing more;"
        " set a smaller one",
    ),
    (
        MissingRoutingFault,
        lambda _, around: not returns_routing(around.engine),
        "no routing is asked for; set engine.return_routing = true (torch, or vllm on GPU), and use an MoE model",
    ),
)
"""Of which kinds -> when it is one -> what is said of it; the first one counts."""


def check_faults(faults: FaultsConfig, around: FaultSurroundings) -> None:
    """Refuse faults that cannot act.

    Raises:
        ValueError: which fault, why, and what to change; the first problem.
    """
    for index, fault in enumerate(faults.plant):
        for kinds, holds, problem in _PROBLEMS:
            if isinstance(fault, kinds) and holds(fault, around):
                raise ValueError(f"faults.plant[{index}] ({fault.type}): {problem.format(fault=fault, around=around)}")
