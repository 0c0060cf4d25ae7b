"""The catalogue of signals: every name once, with type, unit, help, labels and the layer of diagnosis it belongs to.

Each entry has the accessor of its values, read once a step or from the loop as it stands; nothing is drawn or exported
that is not declared here. The entries stand in `orchestrator.metrics.learning`, `orchestrator.metrics.consistency` and
`orchestrator.metrics.system`.
"""

from collections.abc import Mapping

from orchestrator.config import RunConfig
from orchestrator.metrics.consistency import Agreement
from orchestrator.metrics.learning import Blocks, DataAndReward, NumericalUpdates, PolicyChange
from orchestrator.metrics.state import Ended, LabelValues, Moment, Series
from orchestrator.metrics.system import FACTS, System
from orchestrator.metrics.types import MAX_REWARD_PARTS, MAX_STATISTICS, Extent, Metric
from trainer.config.trainer import LocalModelConfig

BLOCK_CATALOGUE: tuple[Metric, ...] = Blocks.metrics
"""Signals with a value for each block of the model, in the block parts."""
CATALOGUE: tuple[Metric, ...] = tuple(
    metric
    for section in (DataAndReward, PolicyChange, NumericalUpdates, Blocks, Agreement, System)
    for metric in section.metrics
)
DECLARED: Mapping[str, Metric] = {metric.name: metric for metric in CATALOGUE}
BY_COLUMN: Mapping[str, Metric] = {metric.column: metric for metric in CATALOGUE}
ROW_METRICS: tuple[Metric, ...] = tuple(metric for metric in CATALOGUE if metric.in_rows)
COLUMNS: tuple[str, ...] = tuple(metric.column for metric in ROW_METRICS)


def at_step(ended: Ended) -> dict[str, Series]:
    """What a step that has just ended says, by name."""
    return {metric.name: metric.at_step(ended) for metric in CATALOGUE if metric.at_step is not None}


def now(moment: Moment) -> dict[str, Series]:
    """What can be read at any time, by name."""
    return {metric.name: metric.now(moment) for metric in CATALOGUE if metric.now is not None}


def sizes_of(config: RunConfig, *, blocks: int, heads: int) -> dict[Extent, int]:
    """How large the sets of label values are in a run, at most."""
    roles = (
        config.reward_workers.workers,
        config.trainer.ranks,
        config.engine.replicas,
        config.episodes.workers,
        config.consistency.workers,
    )
    return {
        Extent.REPLICAS: config.engine.replicas,
        Extent.ACTORS: 2 + sum(roles) + (config.evaluation.every_steps > 0),
        Extent.BLOCKS: blocks,
        Extent.HEADS: heads,
        Extent.ENVIRONMENTS: 1,
        Extent.REWARD_PARTS: MAX_REWARD_PARTS + 1,
        Extent.STATISTICS: MAX_STATISTICS,
        Extent.FACTS: 1,
    }


def facts_of(config: RunConfig) -> LabelValues:
    """What a config says of its run, in the order of `FACTS`."""
    model = config.model
    facts = {
        "model": model.path.name if isinstance(model, LocalModelConfig) else model.type,
        "engine": config.engine.type,
        "replicas": config.engine.replicas,
        "trainer": config.trainer.type,
        "ranks": config.trainer.ranks,
        "algorithm": config.trainer.algorithm.type,
        "environment": config.environment.type,
        "reward": config.reward.type,
        "consistency": config.consistency.mode,
        "batch_groups": config.run.batch_groups,
        "group_size": config.run.group_size,
        "max_staleness": config.staleness.max_staleness,
        "steps": config.run.steps,
    }
    return tuple(str(facts[name]) for name in FACTS)


def max_series(sizes: Mapping[Extent, int]) -> int:
    """Most series of a run of these sizes."""
    return sum(metric.max_series(sizes) for metric in CATALOGUE)
