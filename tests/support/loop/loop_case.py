"""One run over scripted engines in this process, for tests of the loop."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.loop.local_fleet import LocalFleet, QuietReporter, inputs_of
from support.paths import MODEL

from orchestrator.config import RunConfig, parse_config
from orchestrator.launch.launch import drive
from orchestrator.run_dir.layout import RunDir, create_run_dir
from orchestrator.signals.observer import NO_SINKS
from rollout.types.protocols import Engine
from trainer.step.scripted import ScriptedTrainer

DEADLINE_S = 30.0


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    document: dict[str, object] = {
        "run": {"dir": str(tmp_path), "name": "run", "steps": 8, "batch_groups": 3, "group_size": 2},
        "engine": {"type": "scripted"},
        "trainer": {"type": "scripted", "checkpoint": {"every_steps": 3}},
        "consistency": {"mode": "off"},
        "deadlines": {"health_interval_s": 0.02, "restart_pause_s": 0.01},
    }
    return parse_config(document, "test", overrides)


class Case:
    """One run directory; `drive` may be called again to resume."""

    def __init__(
        self,
        tmp_path: Path,
        *overrides: str,
        trainer: ScriptedTrainer | None = None,
        wrap: Callable[[Engine, int], Engine] | None = None,
    ) -> None:
        self.config = config_of(tmp_path, *overrides)
        self.run: RunDir = create_run_dir(self.config, "run")
        self.trainer = trainer
        self.wrap = wrap
        self.reporter = QuietReporter()
        self.sinks = NO_SINKS
        self.batches: list[tuple[int, tuple[str, ...]]] = []
        self.during: Callable[[LocalFleet], Any] | None = None
        """Started beside the run, with its fleet."""

    def drive(self) -> dict[str, Any]:
        return asyncio.run(self._drive())

    async def _drive(self) -> dict[str, Any]:
        fleet = LocalFleet(
            self.config, self.run.path, MODEL, self.trainer or ScriptedTrainer(self.config.trainer), self.wrap
        )
        inputs = inputs_of(self.config, MODEL)
        beside = asyncio.create_task(self.during(fleet)) if self.during else None
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await drive(self.config, self.run, inputs, fleet, self.reporter, sinks=self.sinks)
        finally:
            if beside is not None:
                beside.cancel()
            self.batches += fleet.trainer.batches
            await fleet.close()


def assert_accounted(summary: dict[str, Any]) -> None:
    """Invariant 1."""
    ended = summary["trained"] + sum(summary["rejected"].values()) + sum(summary["failed"].values())
    assert summary["dispatched"] == ended + summary["in_flight"]
