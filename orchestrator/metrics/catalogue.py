"""The catalogue of signals: every name once, with type, unit, help, labels and the layer of diagnosis it belongs to.

Values ride on reports and are reduced once a step; nothing is drawn or exported that is not declared here. The entries
stand in `orchestrator.metrics.learning`, `orchestrator.metrics.consistency` and `orchestrator.metrics.system`.
"""

from collections.abc import Mapping

from orchestrator.config import RunConfig
from orchestrator.metrics.consistency import CONSISTENCY
from orchestrator.metrics.learning import BLOCKS, DATA_AND_REWARD, NUMERICAL, POLICY
from orchestrator.metrics.system import SYSTEM
from orchestrator.metrics.types import MAX_REWARD_PARTS, Extent, Metric

BLOCK_CATALOGUE: tuple[Metric, ...] = BLOCKS
"""Signals with a value for each block of the model, in the block parts."""
CATALOGUE: tuple[Metric, ...] = (*DATA_AND_REWARD, *POLICY, *NUMERICAL, *BLOCK_CATALOGUE, *CONSISTENCY, *SYSTEM)
DECLARED: Mapping[str, Metric] = {metric.name: metric for metric in CATALOGUE}
ROW_METRICS: tuple[Metric, ...] = tuple(metric for metric in CATALOGUE if metric.in_rows)
COLUMNS: tuple[str, ...] = tuple(metric.column for metric in ROW_METRICS)


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
    }


def max_series(sizes: Mapping[Extent, int]) -> int:
    """Most series of a run of these sizes."""
    return sum(metric.max_series(sizes) for metric in CATALOGUE)
