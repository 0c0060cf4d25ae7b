"""The service in the whole loop, in one process: what gates, what only watches, and what happens when it is slow or
dead."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.consistency.audit_fakes import ScriptedScorer, scripted_auditor
from support.loop.failing_once import FailingOnce
from support.loop.local_fleet import LocalFleet, QuietReporter, inputs_of
from support.paths import MODEL

from orchestrator.config import RunConfig, parse_config
from orchestrator.dispatch.staleness import Pool
from orchestrator.launch.launch import drive
from orchestrator.loop.audit_queue import AuditQueue
from orchestrator.loop.gap_watch import Baselines
from orchestrator.run_dir.layout import RunDir, create_run_dir
from rollout.errors import ConcordError, UserError
from rollout.store.sqlite.reader import open_reader
from rollout.types.protocols import Engine
from rollout.types.trajectory import Annotation, StoredGroups, Trajectory
from rollout.types.weights import PolicyVersion
from trainer.config.consistency import ConsistencyConfig
from trainer.consistency.checks.gap import GapBaseline
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.consistency.service.auditor import Auditor
from trainer.consistency.service.report import AuditContext, AuditReport
from trainer.step.scripted import ScriptedTrainer
from trainer.types.evidence import decode_evidence
from trainer.types.step import OldLogprobSource, StepReport, StepRequest

DEADLINE_S = 30.0
FAILS_AT = 4
"""The version that a replica fails at."""
BAD = "-1"
"""Suffix of trajectories that a test's scorer finds fault with."""


class WatchedTrainer(ScriptedTrainer):
    """Remembers what each step was given."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config.trainer)
        self.sources: list[OldLogprobSource] = []
        self.verdicts: list[tuple[bytes, ...]] = []
        self.replayed = (0.0, 0.0)
        """Shares of a replay that each step reports."""

    def step(self, groups: StoredGroups, request: StepRequest) -> StepReport:
        self.sources.append(request.old_logprobs)
        self.verdicts.append(groups.verdicts)
        replayed, fallback = self.replayed
        return replace(
            super().step(groups, request), routing_replayed_fraction=replayed, routing_fallback_fraction=fallback
        )


class Case:
    """One run of scripted engines with a service that a test provides."""

    def __init__(
        self,
        tmp_path: Path,
        consistency: dict[str, Any],
        *overrides: str,
        make: Callable[[ConsistencyConfig], Auditor] = scripted_auditor,
        wrap: Callable[[Engine, int], Engine] | None = None,
    ) -> None:
        document: dict[str, object] = {
            "run": {"dir": str(tmp_path), "name": "run", "steps": 6, "batch_groups": 3, "group_size": 2},
            "engine": {"type": "scripted"},
            "trainer": {"type": "scripted"},
            "consistency": {"mode": "off"},
            "deadlines": {"health_interval_s": 0.02},
        }
        parsed = parse_config(document, "test", overrides)
        # Scripted engines belong to no model, which the config refuses to audit; here the service is scripted too.
        self.config = parsed.model_copy(update={"consistency": ConsistencyConfig.model_validate(consistency)})
        self.run: RunDir = create_run_dir(self.config, "run")
        self.trainer = WatchedTrainer(self.config)
        self._make, self._wrap = make, wrap

    def drive(self, on_step: Callable[[int], None] = lambda step: None) -> dict[str, Any]:
        reporter = QuietReporter()
        reporter.on_step = on_step

        async def main() -> dict[str, Any]:
            fleet = LocalFleet(self.config, self.run.path, MODEL, self.trainer, self._wrap)
            fleet.make_auditor = lambda: self._make(self.config.consistency)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    return await drive(self.config, self.run, inputs_of(self.config, MODEL), fleet, reporter)
            finally:
                await fleet.close()

        return asyncio.run(main())

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run.path / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]


def shifted(shift: Callable[[Trajectory, ScoreOptions], float]) -> Callable[[ConsistencyConfig], Auditor]:
    return lambda config: scripted_auditor(config, ScriptedScorer(shift))


class Broken(Auditor):
    """Raises at its first `times` calls, over all incarnations."""

    def __init__(self, config: ConsistencyConfig, left: list[int]) -> None:
        self._inner, self._left = scripted_auditor(config), left

    def audit(
        self, groups: StoredGroups, context: AuditContext, kind: str
    ) -> tuple[AuditReport, tuple[Annotation, ...]]:
        from rollout.errors import ProcessLostError

        if self._left[0] > 0:
            self._left[0] -= 1
            raise ProcessLostError("the service was killed")
        return self._inner.audit(groups, context, kind)


class Stuck(Auditor):
    """Answers nothing before it is let go."""

    def __init__(self, released: threading.Event) -> None:
        self._released = released

    def audit(
        self, groups: StoredGroups, context: AuditContext, kind: str
    ) -> tuple[AuditReport, tuple[Annotation, ...]]:
        self._released.wait(DEADLINE_S)
        return AuditReport(groups=(), gaps=(), scored_tokens=0, seconds=0.0, held_versions=0, held_bytes=0), ()


class Late(Auditor):
    """The service, which answers only once it is let go."""

    def __init__(self, auditor: Auditor, released: threading.Event) -> None:
        self._auditor, self._released = auditor, released

    def audit(
        self, groups: StoredGroups, context: AuditContext, kind: str
    ) -> tuple[AuditReport, tuple[Annotation, ...]]:
        self._released.wait(DEADLINE_S)
        return self._auditor.audit(groups, context, kind)


class FailsAndSays(FailingOnce):
    """Says when the slot's second incarnation is made."""

    def __init__(self, slot: int, made: threading.Event) -> None:
        super().__init__(slot, "canary", FAILS_AT)
        self._made, self._engines = made, 0

    def __call__(self, engine: Engine, slot: int) -> Engine:
        self._engines += slot == self.slot
        if self._engines == 2:
            self._made.set()
        return super().__call__(engine, slot)


def assert_accounted(summary: dict[str, Any]) -> None:
    ended = summary["trained"] + sum(summary["rejected"].values()) + sum(summary["failed"].values())
    assert summary["dispatched"] == ended + summary["in_flight"]


def test_groups_of_a_wrong_replica_that_are_judged_after_it_has_gone_do_not_end_its_successor(tmp_path: Path) -> None:
    """Each of them says weight_sync, of an incarnation that is replaced already: one restart, and the run goes on."""
    made = threading.Event()

    def gap(trajectory: Trajectory, options: ScoreOptions) -> float:
        """Whatever the first incarnation of replica 1 has sampled is far from the trainer."""
        newest = trajectory.version_spans[-1].policy.version
        return 0.1 if trajectory.tag.replica == 1 and newest < FAILS_AT else 0.0

    case = Case(
        tmp_path,
        {"mode": "audit", "audit_fraction": 1.0},
        "engine.replicas=2",
        "run.steps=30",
        "staleness.max_staleness=4",
        "engine.latency_mean_s=0.004",
        "engine.latency_sigma=1.0",
        "engine.slots=4",
        make=lambda config: Late(scripted_auditor(config, ScriptedScorer(gap)), made),
        wrap=FailsAndSays(1, made),
    )
    baselines = Baselines(case.run.path / "baseline.json")
    for slot in (0, 1):
        baselines.set(GapBaseline(engine="scripted", replica=slot, mean_abs=1e-6, k3=0.0, f2=0.0, tokens=100))
    summary = case.drive()
    assert summary["version"] == 30
    assert summary["replica_restarts"] == len(case.events("replica_failed")) == 1
    assert "weight_sync" in [e["cause"] for e in case.events("consistency_finding") if e["codes"] != "canary"]
    assert_accounted(summary)


@pytest.mark.parametrize("eta", [0, 2])
def test_gate_trains_on_nothing_that_was_not_scored(tmp_path: Path, eta: int) -> None:
    case = Case(tmp_path, {"mode": "gate"}, f"staleness.max_staleness={eta}")
    summary = case.drive()
    assert summary["version"] == 6
    assert case.trainer.sources == [OldLogprobSource.RECOMPUTED] * 6
    evidence = [decode_evidence(verdict) for step in case.trainer.verdicts for verdict in step]
    assert all(trajectory.scored.any() for group in evidence for trajectory in group.trajectories)
    assert_accounted(summary)


def test_a_quarantined_group_is_not_trained_on_and_its_capacity_and_prompt_come_back(tmp_path: Path) -> None:
    """Both trajectories of every fifth dispatch fail; with eta = 0 a lost slot would stop the loop."""

    def shift(trajectory: Trajectory, options: ScoreOptions) -> float:
        return 0.2 if int(trajectory.dispatch_id[1:]) % 5 == 4 else 0.0

    case = Case(tmp_path, {"mode": "gate"}, "staleness.max_staleness=0", make=shifted(shift))
    summary = case.drive()
    assert summary["version"] == 6
    assert summary["rejected"]["quarantined"] >= 3
    assert_accounted(summary)
    reader = open_reader(case.run.path)
    try:
        trained = {i for commit in reader.commits() for i in commit.dispatch_ids}
        refused = [event["dispatch_id"] for event in case.events("rejected")]
        assert not trained & set(refused)
        assert all(
            reader.read_group(i) is not None and reader.annotations(i) for i in refused
        )  # kept, with its evidence
        assert all(event["readmitted"] for event in case.events("rejected"))
    finally:
        reader.close()


def test_one_bad_trajectory_leaves_its_group_in_training(tmp_path: Path) -> None:
    case = Case(
        tmp_path,
        {"mode": "gate", "on_fail": "reject"},
        make=shifted(lambda t, o: 0.2 if t.trajectory_id.endswith(BAD) else 0.0),
    )
    summary = case.drive()
    assert not {"inconsistent", "quarantined"} & set(summary["rejected"])
    verdicts = [t.verdict for step in case.trainer.verdicts for v in step for t in decode_evidence(v).trajectories]
    assert set(verdicts[::2]) == {"accept"}
    assert set(verdicts[1::2]) == {"reject"}


def test_audit_watches_a_share_and_the_estimator_never_hears_of_it(tmp_path: Path) -> None:
    case = Case(tmp_path, {"mode": "audit", "audit_fraction": 0.3}, "run.steps=20", make=shifted(lambda t, o: 0.2))
    summary = case.drive()
    assert case.trainer.sources == [OldLogprobSource.ROLLOUT] * 20
    assert not any(verdict for step in case.trainer.verdicts for verdict in step)
    assert not {"inconsistent", "quarantined"} & set(summary["rejected"])
    assert 0 < summary["consistency"]["audited_groups"] < summary["dispatched"]
    found = case.events("consistency_finding")
    assert found
    for event in found:
        assert sum(
            value for name, value in event.items() if name.endswith("_nats") and name != "gap_nats"
        ) == pytest.approx(event["gap_nats"])
    assert len(case.events("consistency_baseline")) == 1


def test_routing_that_does_not_arrive_is_an_event_once_and_a_column_and_no_finding(tmp_path: Path) -> None:
    case = Case(
        tmp_path, {"mode": "gate"}, make=lambda config: scripted_auditor(config, moe=True, routing_expected=True)
    )
    case.drive()
    (event,) = case.events("routing_incomplete")
    assert (event["replica"], event["coverage"], event["codes"]) == (0, 0.0, "routing_missing")
    assert not case.events("consistency_finding")
    columns = pq.read_table(case.run.metrics).to_pydict()
    assert columns["consistency_routing_coverage"][-1] == 0.0
    assert columns["consistency_routing_mismatch"][-1] == -1.0


def test_a_gap_that_grows_with_the_versions_is_told_once_although_every_audit_passes(tmp_path: Path) -> None:
    limits = {"mean_abs_warn": 1.0, "mean_abs_fail": 2.0, "k3_warn": 1.0, "k3_fail": 2.0, "baseline_multiple": 1e9}
    grows = shifted(lambda t, o: 1e-3 * (5 + t.version_spans[-1].policy.version))
    case = Case(tmp_path, {"mode": "gate", "limits": limits}, "run.steps=25", make=grows)
    case.drive()
    (event,) = case.events("consistency_drift")
    assert event["replica"] == 0
    assert "grows by 0.001 nats a step" in event["detail"]
    assert not case.events("consistency_finding")


def test_what_a_replay_covered_is_logged_with_its_step(tmp_path: Path) -> None:
    case = Case(tmp_path, {"mode": "off"})
    case.trainer.replayed = (0.75, 0.25)
    case.drive()
    columns = pq.read_table(case.run.metrics).to_pydict()
    assert (columns["routing_replayed"], columns["routing_fallback"]) == ([0.75] * 6, [0.25] * 6)


def test_the_same_groups_are_audited_whatever_happened_before(tmp_path: Path) -> None:
    def chosen() -> list[bool]:
        queue = AuditQueue(
            ConsistencyConfig(mode="audit", audit_fraction=0.1), 7, Pool(), [PolicyVersion(1, 0)], lambda replica: True
        )
        return [queue.is_in_the_share(f"d{number:08d}") for number in range(2000)]

    assert chosen() == chosen()
    assert 0.08 < sum(chosen()) / 2000 < 0.12


def test_a_service_that_dies_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    left = [2]
    case = Case(tmp_path, {"mode": "gate"}, make=lambda config: Broken(config, left))
    summary = case.drive()
    assert summary["version"] == 6
    assert case.trainer.sources == [OldLogprobSource.RECOMPUTED] * 6
    assert len(case.events("auditor_lost")) == 2


def test_a_service_that_keeps_dying_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    case = Case(tmp_path, {"mode": "gate"}, make=lambda config: Broken(config, [99]))
    with pytest.raises(ConcordError, match=r"lost 3 times in a row.*consistency.mode"):
        case.drive()


def test_a_service_that_is_behind_degrades_gate_only_if_the_config_says_so_and_says_so(tmp_path: Path) -> None:
    released = threading.Event()
    case = Case(
        tmp_path, {"mode": "gate", "when_behind": "audit", "behind_s": 0.05}, make=lambda config: Stuck(released)
    )
    summary = case.drive(on_step=lambda step: released.set() if step == 6 else None)
    assert summary["version"] == 6
    assert case.trainer.sources == [OldLogprobSource.ROLLOUT] * 6
    degraded = case.events("consistency_degraded")
    assert [event["step"] for event in degraded] == list(range(1, 7))
    assert {event["old_logprobs"] for event in degraded} == {"rollout"}


def test_a_service_past_its_deadline_is_replaced(tmp_path: Path) -> None:
    released = threading.Event()
    makers = iter([lambda config: Stuck(released), scripted_auditor])  # the first hangs, the next is well
    case = Case(tmp_path, {"mode": "gate", "deadline_s": 0.5}, make=lambda config: next(makers)(config))
    summary = case.drive(on_step=lambda step: released.set())
    assert summary["version"] == 6
    (lost,) = case.events("auditor_lost")
    assert "waited 0.5 s for the consistency service" in lost["detail"]


def test_a_resumed_run_goes_on_with_the_baseline_of_its_start(tmp_path: Path) -> None:
    case = Case(tmp_path, {"mode": "gate", "on_fail": "observe"}, make=shifted(lambda t, o: 1e-6))
    case.drive()
    stored = json.loads((case.run.path / "baseline.json").read_text())
    assert [baseline["replica"] for baseline in stored] == [0]
    longer = Case.__new__(Case)
    longer.__dict__.update(
        case.__dict__
        | {"config": case.config.model_copy(update={"run": case.config.run.model_copy(update={"steps": 8})})}
    )
    longer.drive()
    assert json.loads((case.run.path / "baseline.json").read_text()) == stored
    assert len(case.events("consistency_baseline")) == 1


def test_a_baseline_survives_its_file_and_a_foreign_one_is_refused_with_its_cure(tmp_path: Path) -> None:
    path, measured = (
        tmp_path / "baseline.json",
        GapBaseline(engine="vllm", replica=1, mean_abs=0.01, k3=1e-4, f2=0, tokens=100),
    )
    Baselines(path).set(measured)
    assert Baselines(path).get(1) == measured and Baselines(path).get(0) is None
    (document,) = json.loads(path.read_text())
    for changed in (
        {**document, "more": 1},
        {k: v for k, v in document.items() if k != "k3"},
        document | {"tokens": 0},
    ):
        path.write_text(json.dumps([changed]))
        with pytest.raises(UserError, match="measured anew"):
            Baselines(path)
