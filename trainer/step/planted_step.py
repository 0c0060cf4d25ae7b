"""A step into whose gradient the faults that are due are planted first."""

from collections.abc import Sequence
from dataclasses import replace

from trainer.batching.batcher import TrainingBatch
from trainer.planted.due import DueFaults
from trainer.planted.mistakes import MistakenLoss
from trainer.step.gradient_search import GradientSearch
from trainer.step.gradient_step import GradientReport, GradientSeam, PhaseClock
from trainer.types.evidence import AuditedGroup
from trainer.types.step import StepBatches


class MistakenGradientStep:
    """Wraps `inner`, in whose loss are the mistakes of `loss`."""

    def __init__(self, inner: GradientSeam, loss: MistakenLoss) -> None:
        self._inner, self._loss = inner, loss

    @property
    def search(self) -> GradientSearch | None:
        """That of the step inside."""
        return self._inner.search

    def run(
        self, step: int, packed: StepBatches, batch: TrainingBatch, audited: Sequence[AuditedGroup], clock: PhaseClock
    ) -> GradientReport:
        """As `GradientSeam.run`."""
        self._loss.begin(step)
        return self._inner.run(step, packed, batch, audited, clock)


class PlantedGradientStep:
    """Wraps `inner`, whose loss `due` plants into."""

    def __init__(self, inner: GradientSeam, due: DueFaults) -> None:
        self._inner, self._due = inner, due

    @property
    def search(self) -> GradientSearch | None:
        """That of the step inside."""
        return self._inner.search

    def run(
        self, step: int, packed: StepBatches, batch: TrainingBatch, audited: Sequence[AuditedGroup], clock: PhaseClock
    ) -> GradientReport:
        """As `GradientSeam.run`; the report says what was planted, or could not be."""
        acted = self._due.begin(step, batch, packed)
        report = self._inner.run(step, acted.micro_batches, acted.batch, audited, clock)
        return replace(report, planted=acted.planted)
