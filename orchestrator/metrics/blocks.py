"""Reads the values of each block from a step's report. It knows no file."""

from collections.abc import Iterator
from dataclasses import dataclass

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
    """All that a report says about single blocks; what was not measured is not there."""
    return list(_values(report))


def _values(report: StepReport) -> Iterator[BlockValue]:
    for block, norm in report.block_norms:
        yield BlockValue(signal="block_grad_norm", block=block, value=norm)
    for block, scale in report.block_scales:
        yield BlockValue(signal="block_clip_scale", block=block, value=scale)
    for block, threshold in report.block_thresholds:
        if threshold is not None:
            yield BlockValue(signal="block_clip_threshold", block=block, value=threshold)
    for probe, block, value in report.probes:
        yield BlockValue(signal=f"block_{probe}", block=block, value=value)
    for block, heads in report.attention_logits:
        for head, logit in enumerate(heads):
            yield BlockValue(signal="block_max_attention_logit", block=block, head=head, value=logit)
