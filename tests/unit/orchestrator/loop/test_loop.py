"""The whole loop in one process: real store, episode workers, rewards and scripted engines; what must hold whatever
happens to them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.loop.engine_wrap import EngineWrap
from support.loop.failing_once import FailingOnce
from support.loop.local_fleet import LocalFleet
from support.loop.loop_case import Case, assert_accounted, config_of

from orchestrator.config import RunConfig
from orchestrator.deadlines import Progress
from orchestrator.loop.training import Training
from rollout.errors import ConcordError, DeadlineError, ProcessLostError, WeightSyncError
from rollout.store.sqlite.reader import open_reader
from rollout.types.dispatch import Dispatch, DispatchState
from rollout.types.generation import GenerationRequest, TokenChunk
from rollout.types.protocols import Engine
from rollout.types.trajectory import GroupHeader, StoredGroups
from rollout.types.weights import PolicyVersion
from trainer.step.scripted import ScriptedTrainer
from trainer.types.step import StepReport, StepRequest

UNEVEN = ("engine.latency_mean_s=0.004", "engine.latency_sigma=1.0", "engine.slots=8")
"""Latencies with a long tail, so that groups finish out of order and updates fall into running samples."""


def trained_versions(case: Case) -> dict[int, list[set[int]]]:
    """Step -> the versions in each group that it trained on, read back from the store."""
    reader = open_reader(case.run.path)
    try:
        found: dict[int, list[set[int]]] = {}
        for commit in reader.commits():
            for dispatch_id in commit.dispatch_ids:
                group = reader.read_group(dispatch_id)
                assert group is not None
                versions = {s.policy.version for t in group.trajectories for s in t.version_spans}
                found.setdefault(commit.policy.version, []).append(versions)
        return found
    finally:
        reader.close()


@pytest.mark.parametrize("eta", [0, 1, 3])
@pytest.mark.parametrize("policy", ["drop", "wait"])
def test_no_trained_token_is_older_than_eta(tmp_path: Path, eta: int, policy: str) -> None:
    """Invariant 2, read back from what is on disk."""
    case = Case(tmp_path, f"staleness.max_staleness={eta}", f"staleness.policy={policy}", *UNEVEN)
    summary = case.drive()
    for step, groups in trained_versions(case).items():
        assert len(groups) == case.config.run.batch_groups
        assert all(step - 1 - version <= eta for versions in groups for version in versions)
    assert_accounted(summary)
    assert summary["max_token_staleness"] <= eta


def test_mask_trains_no_stale_token_and_counts_what_it_masked(tmp_path: Path) -> None:
    case = Case(tmp_path, "staleness.max_staleness=1", "staleness.policy=mask", "run.steps=20", *UNEVEN)
    summary = case.drive()
    assert summary["max_token_staleness"] <= 1
    masked = summary["trajectories"]["masked"]
    assert sum(summary["trajectories"][kind] for kind in ("trained", "dropped")) == 20 * 3 * 2
    assert (masked > 0) == any(
        version < step - 2
        for step, groups in trained_versions(case).items()
        for versions in groups
        for version in versions
    )


def test_eta_0_samples_every_token_of_a_step_under_the_version_before_it(tmp_path: Path) -> None:
    case = Case(tmp_path, "staleness.max_staleness=0", *UNEVEN)
    summary = case.drive()
    assert trained_versions(case) == {step: [{step - 1}] * 3 for step in range(1, 9)}
    assert summary["rejected"] == {}
    assert summary["dispatched"] == 8 * 3


@pytest.mark.parametrize("eta", [0, 1, 2])
def test_deterministic_mode_fixes_the_version_of_every_step(tmp_path: Path, eta: int) -> None:
    """The groups of step k are sampled wholly under version max(0, k - 1 - eta), in dispatch order."""
    case = Case(
        tmp_path, f"staleness.max_staleness={eta}", "run.deterministic=true", "staleness.order=dispatch", *UNEVEN
    )
    case.drive()
    assert trained_versions(case) == {step: [{max(0, step - 1 - eta)}] * 3 for step in range(1, 9)}
    assert [i for _, ids in case.batches for i in ids] == [f"d{n:08d}" for n in range(24)]


def test_updates_in_mid_generation_leave_trajectories_of_several_versions(tmp_path: Path) -> None:
    case = Case(tmp_path, "staleness.max_staleness=3", "run.steps=15", *UNEVEN)
    assert case.drive()["mixed_version_trajectories"] > 0


def test_no_dispatch_is_trained_twice(tmp_path: Path) -> None:
    case = Case(tmp_path, "run.steps=15", *UNEVEN)
    case.drive()
    trained = [i for _, ids in case.batches for i in ids]
    assert len(trained) == len(set(trained)) == 45


def test_a_resumed_run_goes_on_where_its_checkpoint_stands(tmp_path: Path) -> None:
    """Cancelled after step 5 with a checkpoint at 3: steps 4 and 5 were of a lineage that is gone."""
    case = Case(tmp_path, *UNEVEN)

    async def cancel_at_5(fleet: LocalFleet) -> None:
        reached = asyncio.Event()
        case.reporter.on_step = lambda step: reached.set() if step >= 5 else None
        await reached.wait()
        runner.cancel()

    async def first() -> None:
        nonlocal runner
        runner = asyncio.ensure_future(case._drive())
        with pytest.raises(asyncio.CancelledError):
            await runner

    runner: asyncio.Future[Any]
    case.during = cancel_at_5
    asyncio.run(first())
    assert case.reporter.rows[-1]["step"] in (5, 6)
    case.during, case.trainer = None, None
    summary = case.drive()
    assert (summary["version"], summary["steps"], summary["trainer_epoch"]) == (8, 8, 2)
    assert_accounted(summary)
    reader = open_reader(case.run.path)
    lineage = [i for commit in reader.commits() for i in commit.dispatch_ids]
    assert [commit.policy.version for commit in reader.commits()] == list(range(1, 9))
    reader.close()
    assert len(lineage) == len(set(lineage)) == 24


def test_admission_after_a_resume_stays_within_the_window(tmp_path: Path) -> None:
    """A recovered run must not admit a burst: unfinished groups never exceed (eta + 1) x batch."""
    case = Case(tmp_path, "run.steps=3", "staleness.max_staleness=2")
    case.drive()
    case.config = config_of(tmp_path, "run.steps=9", "staleness.max_staleness=2")
    case.drive()
    assert all(row["running"] + row["ready"] <= 9 for row in case.reporter.rows)


@pytest.mark.parametrize("how", ["digest", "canary", "nan"])
def test_a_replica_with_wrong_weights_is_replaced_and_the_run_goes_on(tmp_path: Path, how: str) -> None:
    """A checksum alone would pass `canary` and `nan`: the semantic canary finds them."""
    case = Case(tmp_path, "engine.replicas=2", "run.steps=12", *UNEVEN, wrap=FailingOnce(1, how))
    summary = case.drive()
    assert summary["version"] == 12
    assert summary["replica_restarts"] == 1
    assert_accounted(summary)
    events = (case.run.path / "events.jsonl").read_text()
    assert '"replica_failed"' in events


@pytest.mark.parametrize("how", ["digest", "canary", "nan"])
def test_a_run_whose_only_replica_has_wrong_weights_stops_with_the_reason(tmp_path: Path, how: str) -> None:
    case = Case(tmp_path, wrap=FailingOnce(0, how))
    with pytest.raises(WeightSyncError, match="no engine replica took over e1-v1"):
        case.drive()


def test_a_killed_replica_is_replaced_and_its_prompts_come_again(tmp_path: Path) -> None:
    case = Case(tmp_path, "run.steps=12", *UNEVEN)

    async def kill_one(fleet: LocalFleet) -> None:
        reached = asyncio.Event()
        case.reporter.on_step = lambda step: reached.set() if step == 4 else None
        await reached.wait()
        await fleet.engines[0].kill()

    case.during = kill_one
    summary = case.drive()
    assert summary["version"] == 12
    assert summary["replica_restarts"] == 1
    assert_accounted(summary)


def test_a_killed_episode_worker_is_replaced_and_its_prompts_come_again(tmp_path: Path) -> None:
    case = Case(tmp_path, "run.steps=12", *UNEVEN)

    async def kill_one(fleet: LocalFleet) -> None:
        reached = asyncio.Event()
        case.reporter.on_step = lambda step: reached.set() if step == 4 else None
        await reached.wait()
        await fleet.workers[0].kill()

    case.during = kill_one
    summary = case.drive()
    assert summary["version"] == 12
    assert summary["worker_restarts"] == 1
    assert_accounted(summary)


def test_a_worker_that_refuses_work_gets_no_more_before_it_is_replaced(tmp_path: Path) -> None:
    """Admission hears of its death before collection does; were it to try again at once, it would dispatch without end
    and let nobody else run."""
    case = Case(tmp_path, "run.steps=12", "episodes.workers=1", *UNEVEN)
    refused: list[int] = []

    async def refuse_from_step_4(fleet: LocalFleet) -> None:
        reached = asyncio.Event()
        case.reporter.on_step = lambda step: reached.set() if step == 4 else None
        await reached.wait()
        worker = fleet.workers[0]

        async def submit(dispatches: Sequence[Dispatch]) -> None:
            assert not refused, "a worker that is lost was given work again"
            refused.append(len(dispatches))
            worker.dead.set()
            raise ProcessLostError("the episode worker was killed")

        worker.submit = submit

    case.during = refuse_from_step_4
    summary = case.drive()
    assert summary["version"] == 12
    assert summary["worker_restarts"] == 1
    assert summary["failed"]["worker"] >= refused[0] > 0
    assert_accounted(summary)


class Stuck(EngineWrap):
    """An engine that answers only requests whose id passes `answers`."""

    def __init__(self, engine: Engine, answers: Callable[[str], bool]) -> None:
        super().__init__(engine)
        self._answers = answers

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        if not self._answers(request.request_id):
            await asyncio.Event().wait()
        async for chunk in self.engine.generate(request):
            yield chunk


def test_a_run_that_stops_moving_ends_with_the_name_of_what_it_waits_for(tmp_path: Path) -> None:
    case = Case(tmp_path, "deadlines.stall_s=0.3", wrap=lambda engine, slot: Stuck(engine, lambda request_id: False))
    with pytest.raises(DeadlineError, match=r"training waits for 3 groups ready"):
        case.drive()


def test_an_episode_past_its_deadline_fails_and_its_prompt_comes_again(tmp_path: Path) -> None:
    stuck = lambda engine, slot: Stuck(engine, lambda request_id: not request_id.startswith("d00000001"))  # noqa: E731
    case = Case(tmp_path, "episodes.deadline_s=0.2", "staleness.order=dispatch", wrap=stuck)
    summary = case.drive()
    assert summary["failed"] == {"deadline": 1} and summary["version"] == 8
    assert_accounted(summary)


class NonFinite(ScriptedTrainer):
    """Steps whose number of tries is in `bad` are skipped."""

    def __init__(self, config: RunConfig, bad: Callable[[int], bool]) -> None:
        super().__init__(config.trainer)
        self._bad, self._tries = bad, 0

    def step(self, groups: StoredGroups, request: StepRequest) -> StepReport:
        from dataclasses import replace

        self._tries += 1
        report = super().step(groups, request)
        return replace(report, skipped="non-finite gradient") if self._bad(self._tries) else report


class NothingToLearn(ScriptedTrainer):
    """The first group of every step is left out for having no difference."""

    def step(self, groups: StoredGroups, request: StepRequest) -> StepReport:
        from dataclasses import replace

        report = super().step(groups, request)
        first = groups.dispatch_ids[0]
        kept = frozenset(t for t in report.trained_ids if not t.startswith(first))
        return replace(report, trained_ids=kept, dropped_groups=frozenset({first}))


class OnlySkips(Training):
    """Every step takes 100 s of a clock and is skipped; `silences` has what the stall watch sees at the beginning of
    each."""

    def __init__(self) -> None:
        self.now, self.silences, self.stop = 0.0, list[float](), asyncio.Event()
        self.progress = Progress(lambda: self.now)
        none: Any = None
        book: Any = SimpleNamespace(progress=self.progress)
        publisher: Any = SimpleNamespace(committed=SimpleNamespace(policy=PolicyVersion(1, 0)))
        super().__init__(
            trainer=none, book=book, gate=none, publisher=publisher, checkpoints=none, deadlines=none, log=none
        )

    async def _batch(self, stop: asyncio.Event) -> tuple[GroupHeader, ...]:
        self.silences.append(self.progress.silence_s())
        header: Any = object()
        return () if len(self.silences) > 5 else (header,)

    async def _step(self, batch: Sequence[GroupHeader], waited_s: float) -> None:
        self.now += 100.0


def test_steps_that_are_skipped_are_no_stall() -> None:
    training = OnlySkips()
    asyncio.run(training.run(3, 1, training.stop))
    assert training.silences == [0.0] * 6


def test_a_non_finite_step_is_skipped_with_an_event_and_training_goes_on(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.trainer = NonFinite(case.config, lambda tries: tries == 3)
    summary = case.drive()
    assert summary["version"] == 8
    assert summary["skipped_steps"] == 1
    assert summary["rejected"]["non_finite"] == 3
    assert '"step_skipped"' in (case.run.path / "events.jsonl").read_text()
    assert_accounted(summary)


def test_a_group_without_a_difference_that_is_left_out_ends_as_such_and_does_not_come_again(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.trainer = NothingToLearn(case.config.trainer)
    summary = case.drive()
    assert summary["rejected"]["no_difference"] == summary["version"] == 8
    lines = [json.loads(line) for line in (case.run.path / "events.jsonl").read_text().splitlines()]
    left_out = [line["dispatch_id"] for line in lines if line.get("reason") == "no_difference"]
    assert len(left_out) == 8
    reader = open_reader(case.run.path)
    records = [reader.dispatch_record(f"d{number:08d}") for number in range(40)]
    reader.close()
    prompts = {r.dispatch.prompt.prompt_id for r in records if r is not None and r.dispatch.dispatch_id in left_out}
    again = {r.dispatch.prompt.prompt_id for r in records if r is not None and r.dispatch.attempt > 1}
    assert len(prompts) == 8 and not prompts & again
    assert_accounted(summary)


def test_steps_that_are_never_finite_end_the_run_with_the_reason(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.trainer = NonFinite(case.config, lambda tries: True)
    with pytest.raises(ConcordError, match="10 steps in a row") as ended:
        case.drive()
    assert "do not change the learning rate" in str(ended.value) and "lower learning rate" not in str(ended.value)


def test_every_ended_dispatch_has_one_end_in_the_events(tmp_path: Path) -> None:
    case = Case(tmp_path, *UNEVEN)
    case.drive()
    reader = open_reader(case.run.path)
    for number in range(24):
        record = reader.dispatch_record(f"d{number:08d}")
        assert record is not None
        if record.state in (DispatchState.TRAINED, DispatchState.REJECTED, DispatchState.FAILED):
            ends = [e for e in reader.events(f"d{number:08d}") if e["kind"] in ("trained", "rejected", "failed")]
            assert len(ends) == 1
    reader.close()
