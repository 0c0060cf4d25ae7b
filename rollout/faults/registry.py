"""From the section `[faults]` to wrappers round one replica. Without a fault for it, an engine stays as it is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.config import EngineConfig
from rollout.faults.config import (
    Bf16LogprobsFault,
    ConstantSeedFault,
    FaultsConfig,
    FaultSection,
    KvKeptFault,
    MissingRoutingFault,
    RawLogprobsFault,
    RetokenizedTurnFault,
    ShortLogprobsFault,
    SilentTemperatureFault,
    SilentTopPFault,
    SlowReplicaFault,
    VersionOffByOneFault,
    WeightFaultSection,
)
from rollout.faults.engines.answers import (
    ChangedAnswers,
    ChunkChange,
    RawLogprobs,
    RequestChange,
    SlowReplica,
    at_temperature,
    in_bf16,
    labelled_before,
    one_short,
    retokenized,
    with_half_routing,
    with_one_seed,
    with_top_p,
    without_routing,
)
from rollout.faults.engines.weights import DoctoredWeights, KeptCache
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.protocols import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """What a fault is given besides its engine and its section."""

    seed: int
    folder: Path
    tokenizer: Tokenizer | None


_Wrap = Callable[[Engine, Any, _Site], Engine]


def _requests(change: Callable[[Any, _Site], RequestChange]) -> _Wrap:
    return lambda engine, fault, at: ChangedAnswers(engine, fault, at.seed, request=change(fault, at))


def _chunks(change: Callable[[Any], ChunkChange]) -> _Wrap:
    return lambda engine, fault, at: ChangedAnswers(engine, fault, at.seed, chunk=change(fault))


_WRAPS: tuple[tuple[type[FaultSection], _Wrap], ...] = (
    (WeightFaultSection, lambda engine, fault, at: DoctoredWeights(engine, fault, at.seed, at.folder)),
    (KvKeptFault, lambda engine, fault, _: KeptCache(engine, fault)),
    (SlowReplicaFault, lambda engine, fault, at: SlowReplica(engine, fault, at.seed)),
    (SilentTopPFault, _requests(lambda fault, _: with_top_p(fault.top_p))),
    (SilentTemperatureFault, _requests(lambda fault, _: at_temperature(fault.temperature))),
    (ConstantSeedFault, _requests(lambda _, at: with_one_seed(at.seed))),
    (RetokenizedTurnFault, _requests(lambda _, at: retokenized(at.tokenizer))),
    (RawLogprobsFault, lambda engine, fault, at: RawLogprobs(engine, fault, at.seed)),
    (Bf16LogprobsFault, _chunks(lambda _: in_bf16)),
    (MissingRoutingFault, _chunks(lambda fault: with_half_routing if fault.how == "half" else without_routing)),
    (ShortLogprobsFault, _chunks(lambda _: one_short)),
    (VersionOffByOneFault, _chunks(lambda _: labelled_before)),
)
"""Kind -> how it wraps an engine, from the engine outwards: log-probs are replaced before they are rounded, and labels
are wrong for the reader only."""


def plant_engine(
    engine: Engine, faults: FaultsConfig, replica: int, *, scratch: Path, tokenizer: Tokenizer | None = None
) -> Engine:
    """Wrap an engine in the faults that are planted on its replica; without any, `engine` itself.

    Args:
        engine: not yet started.
        faults: the run's.
        replica: slot of the engine.
        scratch: where doctored weights may lie; on the file system of the published ones, most of them are hard links.
            Each replica has folders of its own there; `stop` removes them, and so does the next start.
        tokenizer: for `retokenized_turn`.

    Raises:
        UserError: `retokenized_turn` without a tokenizer.
    """
    mine = [fault for fault in faults.plant if isinstance(fault, FaultSection) and fault.replica == replica]
    planted = [(wrap, fault) for kind, wrap in _WRAPS for fault in mine if isinstance(fault, kind)]
    for index, (wrap, fault) in enumerate(planted):
        folder = scratch / f"replica-{replica}" / f"{index}-{fault.type}"
        engine = wrap(engine, fault, _Site(seed=faults.seed, folder=folder, tokenizer=tokenizer))
    return engine


def planted_engine_config(config: EngineConfig, faults: FaultsConfig, replica: int) -> EngineConfig:
    """The engine section that a replica is really built with: `kv_kept` needs an engine that can keep its cache, while
    its wrapper declares `recompute`."""
    if any(isinstance(fault, KvKeptFault) and fault.replica == replica for fault in faults.plant):
        return config.model_copy(update={"kv_across_versions": "keep"})
    return config
