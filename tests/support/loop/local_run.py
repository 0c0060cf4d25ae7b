"""A whole run in this process, with a real trainer."""

import asyncio
from typing import Any

from support.loop.local_fleet import LocalFleet, QuietReporter, inputs_of

from orchestrator.config import RunConfig
from orchestrator.exporters.prometheus import Exporter
from orchestrator.launch.launch import drive
from orchestrator.run_dir.layout import RunDir, create_run_dir
from orchestrator.signals.observer import Sinks
from trainer.config.trainer import LocalModelConfig
from trainer.loss.loss_settings import LossSettings
from trainer.step.build import build_trainer


def drive_to_its_end(
    config: RunConfig,
    *,
    reporter: QuietReporter | None = None,
    exporter: Exporter | None = None,
    deadline_s: float = 100.0,
) -> RunDir:
    """Create a run of a local model and drive it, with one trainer rank, which is closed whatever happens."""
    assert isinstance(config.model, LocalModelConfig)
    model_dir, run = config.model.path, create_run_dir(config, "run")
    trainer = build_trainer(
        model_dir=model_dir,
        config=config.trainer,
        weights=config.weights,
        total_steps=config.run.steps,
        seed=config.run.seed,
        rank=0,
        init_method=f"file://{run.path / 'rendezvous'}",
        settings=LossSettings(correction=config.consistency.correction, faults=config.faults),
    )

    async def main() -> dict[str, Any]:
        fleet = LocalFleet(config, run.path, model_dir, trainer)
        try:
            async with asyncio.timeout(deadline_s):
                return await drive(
                    config,
                    run,
                    inputs_of(config, model_dir),
                    fleet,
                    reporter or QuietReporter(),
                    sinks=Sinks(exporter=exporter),
                )
        finally:
            await fleet.close()

    try:
        asyncio.run(main())
    finally:
        trainer.close()
    return run
