"""What a run keeps of its steps as they end: rows and values of blocks and histograms on disk, the console, Prometheus
and the trackers, and no weights that nobody needs any more."""

from orchestrator.launch.console import Reporter
from orchestrator.loop.parts import LoopParts
from orchestrator.metrics.blocks import block_values
from orchestrator.observers import Observer, StepDone
from orchestrator.run_dir.histogram_writer import HistogramRecorder
from orchestrator.run_dir.layout import RunDir
from orchestrator.run_dir.metrics_writer import BlockRecorder, MetricsRecorder
from orchestrator.signals.observer import Observing
from orchestrator.signals.rows import Signals


class StepRecorder(Observer):
    """Hears every step of one loop."""

    def __init__(
        self,
        run: RunDir,
        parts: LoopParts,
        signals: Signals,
        reporter: Reporter,
        steps: int,
        observing: Observing | None,
    ) -> None:
        """`observing` serves Prometheus and the trackers; None where nobody asked for either."""
        self._parts, self._signals, self._reporter = parts, signals, reporter
        self._steps, self._observing = steps, observing
        self._side_files = parts.book.side_files
        counted, start = parts.accounts.distributions, parts.training.policy
        self._metrics, self._blocks = MetricsRecorder(run.metrics), BlockRecorder(run.block_metrics)
        self._histograms = HistogramRecorder(run.histograms, counted, start)

    async def step_done(self, done: StepDone) -> None:
        row, blocks, policy = self._signals.row(done), block_values(done.report), done.report.policy
        spared = self._side_files.spared
        with spared("metrics"):
            self._metrics.add(row)
        with spared("block_metrics"):
            self._blocks.add(policy, blocks)
        self._parts.doctor.step(row, self._parts.book.counts, blocks)
        with spared("histograms"):
            self._histograms.add(policy)
        if done.checkpointed:
            self.flush()
        self._reporter.step(row, self._steps)
        if self._observing is not None:
            await self._observing.step(done, row)
        with spared("weights that nothing refers to any more"):
            self._parts.checkpoints.prune(policy)
        await self._side_files.report()

    async def score_taken(self) -> None:
        if self._observing is not None:
            await self._observing.score()

    def flush(self) -> None:
        """What a checkpoint holds is on disk, and no histogram reaches over one: a resume takes back whole parts."""
        parts = {"metrics": self._metrics, "block_metrics": self._blocks, "histograms": self._histograms}
        for name, part in parts.items():
            with self._side_files.spared(name):
                part.flush()
