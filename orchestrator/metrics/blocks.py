"""The values of each block in a step's report, as the block parts hold them. It knows no file."""

from dataclasses import dataclass

from orchestrator.metrics.catalogue import BLOCK_CATALOGUE
from rollout.errors import ConcordError
from trainer.types.step import StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockValue:
    """One value of one block, of one of its heads where the signal has them."""

    signal: str
    """A column name of `orchestrator.metrics.catalogue.BLOCK_CATALOGUE`."""
    block: str
    value: float
    head: int | None = None


def block_values(report: StepReport) -> list[BlockValue]:
    """All that a report says about single blocks; what was not measured is not there.

    Raises:
        ConcordError: a probe is not declared.
    """
    declared = {metric.column for metric in BLOCK_CATALOGUE}
    if strange := {f"block_{probe}" for probe, _, _ in report.probes} - declared:
        raise ConcordError(f"got values of {sorted(strange)}, which no section declares; see orchestrator/metrics")
    return [
        BlockValue(signal=metric.column, block=labels[0], head=int(labels[1]) if labels[1:] else None, value=value)
        for metric in BLOCK_CATALOGUE
        if metric.of_blocks is not None
        for labels, value in metric.of_blocks(report).items()
    ]
