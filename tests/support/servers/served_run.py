"""A run of scripted engines in one process that an exporter serves: mode gate, with a service that finds every token a
given distance away."""

import asyncio
from pathlib import Path
from typing import Any

from support.consistency.audit_fakes import ScriptedScorer, scripted_auditor
from support.loop.local_fleet import LocalFleet, QuietReporter, inputs_of
from support.paths import MODEL

from orchestrator.config import RunConfig, parse_config
from orchestrator.exporters.prometheus import Exporter
from orchestrator.exporters.trackers import Trackers
from orchestrator.launch.launch import drive
from orchestrator.run_dir.layout import RunDir, create_run_dir
from orchestrator.signals.observer import Sinks
from trainer.config.consistency import ConsistencyConfig
from trainer.step.scripted import ScriptedTrainer

BATCH, GROUP = 3, 2
WIDE = {"mean_abs_warn": 1.0, "mean_abs_fail": 2.0, "k3_warn": 1.0, "k3_fail": 2.0}
"""Limits that no distance of a test exceeds."""


def config_of(folder: Path, steps: int) -> RunConfig:
    """Two scripted replicas. The config refuses to audit engines that belong to no model, so the service's part is put
    in afterwards."""
    document: dict[str, object] = {
        "run": {"dir": str(folder), "name": "run", "steps": steps, "batch_groups": BATCH, "group_size": GROUP},
        "engine": {"type": "scripted", "replicas": 2},
        "trainer": {"type": "scripted"},
        "consistency": {"mode": "off"},
        "deadlines": {"health_interval_s": 0.02},
    }
    return parse_config(document, "test").model_copy(
        update={"consistency": ConsistencyConfig.model_validate({"mode": "gate", "limits": WIDE})}
    )


def drive_config(
    config: RunConfig,
    exporter: Exporter | None,
    *,
    shift_nats: float = 0.0,
    reporter: QuietReporter | None = None,
    trackers: Trackers | None = None,
) -> tuple[RunDir, dict[str, Any]]:
    """The run directory and the summary of a run of scripted engines to its end."""
    sinks, run = Sinks(exporter=exporter, trackers=trackers), create_run_dir(config, "run")

    async def main() -> dict[str, Any]:
        fleet = LocalFleet(config, run.path, MODEL, ScriptedTrainer(config.trainer))
        fleet.make_auditor = lambda: scripted_auditor(config.consistency, ScriptedScorer(lambda t, options: shift_nats))
        try:
            async with asyncio.timeout(100.0):
                return await drive(
                    config, run, inputs_of(config, MODEL), fleet, reporter or QuietReporter(), sinks=sinks
                )
        finally:
            await fleet.close()

    return run, asyncio.run(main())


def drive_served(
    folder: Path,
    exporter: Exporter | None,
    steps: int,
    *,
    shift_nats: float = 0.0,
    reporter: QuietReporter | None = None,
    trackers: Trackers | None = None,
) -> tuple[RunDir, dict[str, Any]]:
    """The same, of the usual config."""
    config = config_of(folder, steps)
    return drive_config(config, exporter, shift_nats=shift_nats, reporter=reporter, trackers=trackers)
