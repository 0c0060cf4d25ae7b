"""From the section `[faults]` to wrappers round one replica. Without a fault for it, an engine stays as it is."""

from collections.abc import Sequence
from pathlib import Path

from rollout.config import EngineConfig
from rollout.errors import UserError
from rollout.faults.config import (
    AnswerFault,
    Bf16LogprobsFault,
    EngineFault,
    FaultsConfig,
    FaultSection,
    KvKeptFault,
    MissingRoutingFault,
    PromptFault,
    RawLogprobsFault,
    RetokenizedTurnFault,
    ShortLogprobsFault,
    SilentTopPFault,
    SlowReplicaFault,
    VersionOffByOneFault,
    WeightFault,
)
from rollout.faults.data_config import DataFault
from rollout.faults.engines.answers import (
    ChangedChunks,
    ChangedRequests,
    RawLogprobs,
    RequestChange,
    in_bf16,
    labelled_before,
    one_short,
    retokenized,
    with_half_routing,
    with_top_p,
    without_routing,
)
from rollout.faults.engines.speed import SlowEngine
from rollout.faults.engines.weight_edits import weight_doctor
from rollout.faults.engines.weights import DoctoredWeights, KeptCache
from rollout.faults.gradient_config import GradientFault
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.protocols import Engine

_ORDER: Sequence[type[FaultSection]] = (
    *(KvKeptFault, SlowReplicaFault, SilentTopPFault, RetokenizedTurnFault),
    *(RawLogprobsFault, Bf16LogprobsFault, MissingRoutingFault, ShortLogprobsFault, VersionOffByOneFault),
)
"""From the engine outwards, behind faults in weights: log-probs are replaced before they are rounded, and labels are
wrong for the reader only."""


def plant_engine(
    engine: Engine, faults: FaultsConfig, replica: int, *, scratch: Path, tokenizer: Tokenizer | None = None
) -> Engine:
    """Wrap an engine in the faults that are planted on its replica; without any, `engine` itself.

    Args:
        engine: not yet started.
        faults: of the run.
        replica: slot of the engine.
        scratch: where doctored weights may lie; on the file system of the published ones, most of them are hard links.
            Each replica has folders of its own there; `stop` removes them, and so does the next start.
        tokenizer: for `retokenized_turn`.

    Raises:
        UserError: `retokenized_turn` without a tokenizer.
    """
    mine = [
        fault
        for fault in faults.plant
        if not isinstance(fault, DataFault | GradientFault | PromptFault) and fault.replica == replica
    ]
    for index, fault in enumerate(sorted(mine, key=_rank)):
        if isinstance(fault, WeightFault):
            own = scratch / f"replica-{replica}" / f"{index}-{fault.type}"
            engine = DoctoredWeights(engine, fault, weight_doctor(fault, faults.seed, own), own)
        elif isinstance(fault, KvKeptFault):
            engine = KeptCache(engine, fault)
        elif isinstance(fault, SlowReplicaFault):
            engine = SlowEngine(engine, fault)
        else:
            engine = _answering(engine, fault, faults.seed, tokenizer)
    return engine


def planted_engine_config(config: EngineConfig, faults: FaultsConfig, replica: int) -> EngineConfig:
    """The engine section that a replica is really built with: `kv_kept` needs an engine that can keep its cache, while
    its wrapper declares `recompute`."""
    if any(isinstance(fault, KvKeptFault) and fault.replica == replica for fault in faults.plant):
        return config.model_copy(update={"kv_across_versions": "keep"})
    return config


def _rank(fault: EngineFault) -> int:
    return next((place for place, kind in enumerate(_ORDER, start=1) if isinstance(fault, kind)), 0)


def _answering(engine: Engine, fault: AnswerFault, seed: int, tokenizer: Tokenizer | None) -> Engine:
    if isinstance(fault, RawLogprobsFault):
        return RawLogprobs(engine, fault, fault.type, seed)
    if isinstance(fault, SilentTopPFault | RetokenizedTurnFault):
        return ChangedRequests(engine, fault, fault.type, seed, _request_change(fault, tokenizer))
    if isinstance(fault, Bf16LogprobsFault):
        change = in_bf16
    elif isinstance(fault, ShortLogprobsFault):
        change = one_short
    elif isinstance(fault, MissingRoutingFault):
        change = with_half_routing if fault.how == "half" else without_routing
    else:
        change = labelled_before
    return ChangedChunks(engine, fault, fault.type, seed, change)


def _request_change(fault: SilentTopPFault | RetokenizedTurnFault, tokenizer: Tokenizer | None) -> RequestChange:
    if isinstance(fault, SilentTopPFault):
        return with_top_p(fault.top_p)
    if tokenizer is None:
        raise UserError("fault retokenized_turn needs the tokenizer that turns text into ids; plant it with one")
    return retokenized(tokenizer)
