"""A run that is resumed with a smaller batch or a smaller staleness window finds more ready groups than fit."""

import asyncio
import threading
from pathlib import Path

import pytest
from support.loop.local_fleet import LocalFleet
from support.loop.loop_case import Case, assert_accounted, config_of

from rollout.types.trajectory import StoredGroups
from trainer.config.trainer import TrainerConfig
from trainer.step.scripted import ScriptedTrainer
from trainer.types.step import StepReport, StepRequest

WAIT = ("staleness.policy=wait", "staleness.max_staleness=2")


class HoldsItsStep(ScriptedTrainer):
    """Does its step only when `go` is set."""

    def __init__(self, config: TrainerConfig) -> None:
        super().__init__(config)
        self.go = threading.Event()

    def step(self, groups: StoredGroups, request: StepRequest) -> StepReport:
        assert self.go.wait(10.0)
        return super().step(groups, request)


@pytest.mark.parametrize(
    "smaller",
    [("run.batch_groups=1",), ("staleness.max_staleness=1",), ("run.batch_groups=1", "staleness.max_staleness=1")],
)
def test_policy_wait_trains_the_oldest_and_rejects_the_rest_as_stale(tmp_path: Path, smaller: tuple[str, ...]) -> None:
    """The whole window of nine groups is ready under version 0 when the first run ends with its first step."""
    case = Case(tmp_path, "run.steps=1", *WAIT)
    trainer = case.trainer = HoldsItsStep(case.config.trainer)

    async def until_the_window_is_ready(fleet: LocalFleet) -> None:
        ready = 0
        while ready < 6:
            await asyncio.sleep(0)
            ready = (await fleet.store.counts()).ready
        trainer.go.set()

    case.during = until_the_window_is_ready
    case.drive()
    case.during, case.trainer = None, None
    case.config = config_of(tmp_path, "run.steps=6", "deadlines.stall_s=5", *WAIT, *smaller)
    summary = case.drive()
    assert summary["version"] == 6
    assert summary["rejected"]["stale"] >= 3
    assert summary["max_token_staleness"] <= case.config.staleness.max_staleness
    assert_accounted(summary)
    assert "older than" in (case.run.path / "events.jsonl").read_text()
