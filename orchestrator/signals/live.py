"""All values of the catalogue, read from the loop as it stands and from the newest step, for Prometheus and the
trackers. It serves nothing and blocks nothing.

Counters begin at 0 with this process; numbers "since the run began" are gauges, and columns of the rows.
"""

from collections.abc import Mapping
from dataclasses import replace

from orchestrator.config import RunConfig
from orchestrator.loop.parts import LoopParts
from orchestrator.metrics.catalogue import CATALOGUE, ROW_METRICS, facts_of, now
from orchestrator.metrics.distributions import combinations
from orchestrator.metrics.snapshot import Snapshot
from orchestrator.metrics.types import Extent
from orchestrator.observers import StepDone
from orchestrator.signals.memory import PeakMemory
from orchestrator.signals.rows import Signals


class LiveSignals:
    """The signals of one loop, from its beginning to its end."""

    def __init__(self, config: RunConfig, loop: LoopParts, signals: Signals, memory: PeakMemory) -> None:
        self._config, self._loop, self._signals, self._memory = config, loop, signals, memory
        slots = {"replica": [str(slot) for slot in range(config.engine.replicas)]}
        for metric in CATALOGUE:
            if metric.buckets and any(label.extent is Extent.REPLICAS for label in metric.labels):
                loop.accounts.distributions.begin(metric.name, combinations(metric, slots))

    def step(self, done: StepDone, row: Mapping[str, float]) -> None:
        """An applied step, with its metric row."""
        distributions = self._loop.accounts.distributions
        distributions.observe("concord_step_duration_seconds", row["step_seconds"])
        for part, reduced in done.report.log_ratios:
            distributions.add("concord_log_ratio_nats", reduced, part)

    def took(self, cpu_s: float) -> None:
        """So many CPU seconds of the driver went into all this."""
        self._loop.accounts.observing_took(cpu_s)

    def snapshot(self, row: Mapping[str, float] | None = None) -> Snapshot:
        """All values now. With the row of a step that has just ended, its columns are those of the row."""
        moment = replace(
            self._signals.moment(),
            environment=self._config.environment.type,
            facts=facts_of(self._config),
            batch_groups=self._config.run.batch_groups,
            max_staleness=self._config.staleness.max_staleness,
            memory=self._memory.now,
        )
        found = {**self._signals.newest_step, **now(moment)}
        columns = {metric.column: found[metric.name][()] for metric in ROW_METRICS if metric.name in found} | dict(
            row or {}
        )
        for metric in ROW_METRICS:
            found[metric.name] = {(): columns[metric.column]} if metric.measured(columns) else {}
        return Snapshot(
            numbers={
                name: {labels: float(value) for labels, value in series.items()}
                for name, series in found.items()
                if series
            },
            distributions=self._loop.accounts.distributions.copy(),
        )

    def engine_addresses(self) -> dict[int, str]:
        """host:port by slot of engines that serve metrics of their own."""
        return {replica.slot: replica.metrics_address for replica in self._loop.replicas if replica.metrics_address}
