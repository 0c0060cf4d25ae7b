"""A whole run in this process, with a real trainer."""

import asyncio
from pathlib import Path

from local_fleet import LocalFleet, QuietReporter, inputs_of

from orchestrator.config import RunConfig
from orchestrator.launch import drive
from orchestrator.run_dir import RunDir
from trainer.build import TrainerRank


def drive_to_its_end(config: RunConfig, run: RunDir, model_dir: Path, trainer: TrainerRank, deadline_s: float = 100.0) -> None:
    """Drive a created run, and close its trainer whatever happens."""

    async def main() -> None:
        fleet = LocalFleet(config, run.path, model_dir, trainer)
        try:
            async with asyncio.timeout(deadline_s):
                await drive(config, run, inputs_of(config, model_dir), fleet, QuietReporter())
        finally:
            await fleet.close()

    try:
        asyncio.run(main())
    finally:
        trainer.close()
