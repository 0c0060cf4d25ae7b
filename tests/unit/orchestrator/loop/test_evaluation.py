"""Evaluations in the whole loop, in one process: when they are due, what they leave behind, and that training never
hears of them."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.loop.evaluation_case import DEADLINE_S, Case, FakeEvaluator, report
from support.loop.local_fleet import LocalEvaluator, LocalFleet
from support.loop.run_record import assert_every_dispatch_ends_once, events_of

from orchestrator.deadlines import Progress
from orchestrator.exporters.tracker_tags import STEPS, Points
from orchestrator.exporters.trackers import Trackers
from orchestrator.loop.evaluation import Evaluation
from orchestrator.observers import Observers
from orchestrator.replicas.replicas import Replica
from orchestrator.signals.observer import Sinks
from rollout.config import EvaluationConfig
from rollout.evaluation.evaluator import Evaluates, EvaluationReport
from rollout.types.weights import PolicyVersion


@pytest.mark.parametrize("eta", [0, 2])
def test_the_first_version_every_few_steps_and_the_last_one_are_scored(tmp_path: Path, eta: int):
    case = Case(tmp_path, f"staleness.max_staleness={eta}")
    summary = case.drive()
    asked = [policy.version for _, policy in case.evaluators[0].asked]
    assert asked[0] == 0 and asked[-1] == 8
    assert len(asked) == len(set(asked)) <= 4
    scores = case.events("evaluation")
    assert len(scores) == len(asked)
    last = scores[-1]
    assert (last["version"], last["oldest_version"], last["mixed"], last["prompts"]) == (8, 8, False, 5)
    assert last["weights_digest"] and last["fingerprint"] and last["part_chat_template"] is not None
    assert len({event["fingerprint"] for event in scores}) == 1
    assert (
        summary["dispatched"]
        == summary["trained"]
        + sum(summary["rejected"].values())
        + sum(summary["failed"].values())
        + summary["in_flight"]
    )


class SlowFirst(LocalEvaluator):
    """Its first evaluation begins when the trainer has gone as far as it can without an update of the engines."""

    def __init__(self, evaluator: Evaluates, trained: Callable[[], int], until: int) -> None:
        super().__init__(evaluator)
        self._trained, self._until = trained, until

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        while not self.asked and self._trained() < self._until:  # noqa: ASYNC110 - rows have no event
            await asyncio.sleep(0)
        return await super().evaluate(slot, policy, label)


@pytest.mark.parametrize("eta", [0, 2])
def test_version_0_is_scored_whole_however_long_that_takes_and_training_goes_on_meanwhile(tmp_path: Path, eta: int):
    case = Case(tmp_path, f"staleness.max_staleness={eta}")

    def slow(fleet: LocalFleet) -> None:
        async def new() -> LocalEvaluator:
            case.evaluators.append(SlowFirst(fleet.make_evaluator(), lambda: len(case.reporter.rows), until=eta + 1))
            return case.evaluators[-1]

        fleet.new_evaluator = new

    case.drive(slow)
    first = case.events("evaluation")[0]
    assert (first["version"], first["oldest_version"], first["mixed"]) == (0, 0, False)
    committed = [
        event["policy"]
        for event in events_of(case.run.path)
        if event["kind"] == "version_committed" and event["number"] < first["number"]
    ]
    assert committed == ["e1-v0"]
    assert len([event for event in case.events("step_committed") if event["number"] < first["number"]]) >= eta + 1


class Room:
    """Stands where replicas, publisher, book and fleet stand; its policy is committed, and its evaluator scores
    that."""

    def __init__(self, version: int, *ports: Replica) -> None:
        self.policy, self.digest = PolicyVersion(1, version), "d" * 64
        self.manifest = self.store = self
        self.progress = Progress(lambda: 0.0)
        self.ports = list(ports)
        self.told: asyncio.Queue[str] = asyncio.Queue()

    def serving(self, committed: PolicyVersion) -> list[Replica]:
        return self.ports

    async def new_evaluator(self) -> "Room":
        return self

    async def connect(self, slot: int, engine: object, tag: object) -> None:
        return None

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        return report(versions=(policy.version,))

    async def record_event(self, kind: str, fields: dict[str, Any]) -> None:
        self.told.put_nowait(kind)

    def evaluation(self, fingerprints: Sequence[str] = ()) -> Evaluation:
        room: Any = self
        return Evaluation(
            config=EvaluationConfig(every_steps=4),
            fleet=room,
            replicas=room,
            book=room,
            weights=room,
            observers=Observers(),
            fingerprints=fingerprints,
        )


def a_replica() -> Replica:
    serving: Any = SimpleNamespace(tag="tag", metrics_address="")
    replica = Replica(0)
    replica.begins(serving)
    replica.has_started(serving, 0.0, 1e-5)
    return replica


def test_a_replica_that_begins_to_serve_wakes_an_evaluation_that_found_none():
    async def main() -> None:
        room = Room(0)
        evaluation = room.evaluation()
        async with asyncio.timeout(DEADLINE_S):
            running = asyncio.create_task(evaluation.run())
            for _ in range(5):
                await asyncio.sleep(0)
            assert room.told.empty()
            room.ports.append(a_replica())
            evaluation.replica_serves(0)
            assert await room.told.get() == "evaluation"
        running.cancel()

    asyncio.run(main())


def test_a_configuration_that_a_resume_changes_is_counted_as_a_change():
    evaluation = Room(8).evaluation(["a", "a", "b"])
    assert (evaluation.changes, evaluation.configuration()) == (1, "1")


def test_a_last_version_that_is_scored_already_is_not_scored_again():
    async def main() -> None:
        room = Room(8, a_replica())
        evaluation = room.evaluation()
        async with asyncio.timeout(DEADLINE_S):
            running = asyncio.create_task(evaluation.run())
            assert await room.told.get() == "evaluation"
            await evaluation.last(room.policy, asyncio.Event())
            for _ in range(5):
                await asyncio.sleep(0)
        running.cancel()
        assert room.told.empty()

    asyncio.run(main())


def test_tokens_and_seconds_of_evaluations_are_told_apart_from_training(tmp_path: Path):
    case = Case(tmp_path)
    case.drive()
    last, scores = case.reporter.rows[-1], case.events("evaluation")
    of_rows = [sum(event["tokens"] for event in scores[:n]) for n in range(len(scores) + 1)]
    assert scores[0]["tokens"] == round(scores[0]["length_mean"] * 5) > 0
    assert last["evaluation_tokens"] in of_rows[1:] and 0 < last["evaluation_busy"] < 1


def test_evaluations_leave_no_trace_in_the_store_of_training(tmp_path: Path):
    case = Case(tmp_path)
    case.drive()
    assert_every_dispatch_ends_once(case.run.path)
    assert not [
        event for event in events_of(case.run.path) if str(event.get("dispatch_id", "")).startswith("evaluation")
    ]


def test_rows_hold_the_newest_score_and_count_changes_of_the_configuration(tmp_path: Path):
    case = Case(tmp_path, "evaluation.every_steps=1", steps=12)
    other = (("sampling", "at random"),)
    answers: list[EvaluationReport | Exception] = [report(0.25), report(0.75), report(0.5, other)]
    case.drive(lambda fleet: setattr(fleet, "make_evaluator", lambda: FakeEvaluator(answers)))
    assert {row["eval_score"] for row in case.reporter.rows} <= {-1.0, 0.25, 0.75, 0.5}
    assert case.reporter.rows[-1]["eval_fingerprint_changed"] == 1.0
    assert {event["cause"] for event in case.events("diagnosis")} == {"evaluation_changed"}


class Scores:
    """A tracker that keeps scores."""

    def __init__(self) -> None:
        self.points: list[Points] = []

    def take(self, points: Points) -> None:
        if points.series != STEPS:
            self.points.append(points)

    def close(self) -> None:
        return None


def test_trackers_get_each_score_at_its_version_the_last_one_too(tmp_path: Path):
    case, scores = Case(tmp_path), Scores()
    with Trackers([("scores", scores)], lambda text: None) as trackers:
        case.sinks = Sinks(trackers=trackers)
        case.drive()
    told = [(event["version"], event["score"]) for event in case.events("evaluation")]
    assert told[0][0] == 0 and told[-1][0] == 8
    assert [(points.step, points.numbers[points.series]) for points in scores.points] == told


def test_a_score_over_two_versions_is_marked_mixed_and_names_no_weights(tmp_path: Path):
    case = Case(tmp_path)
    case.drive(lambda fleet: setattr(fleet, "make_evaluator", lambda: FakeEvaluator([report(versions=(3, 4))])))
    event = case.events("evaluation")[0]
    assert (event["version"], event["oldest_version"], event["mixed"], event["weights_digest"]) == (4, 3, True, None)


class NotesTasks(FakeEvaluator):
    """Keeps the names of the tasks that run while the last version is scored."""

    def __init__(self, names: set[str]) -> None:
        super().__init__([report()])
        self._names = names

    async def evaluate(self, slot: int, policy: PolicyVersion, label: str) -> EvaluationReport:
        if policy.version == 2:
            self._names |= {task.get_name() for task in asyncio.all_tasks()}
        return await super().evaluate(slot, policy, label)


def test_a_last_score_that_takes_long_is_no_stall_of_the_training(tmp_path: Path):
    names = set[str]()
    Case(tmp_path, "evaluation.every_steps=50", steps=2).drive(
        lambda fleet: setattr(fleet, "make_evaluator", lambda: NotesTasks(names))
    )
    assert "evaluation" in names
    assert "stall watch" not in names


def test_a_run_that_starts_says_what_its_prompts_are(tmp_path: Path):
    case = Case(tmp_path, 'environment={type="arithmetic", prompts=40}', steps=2)
    case.drive()
    (event,) = case.events("prompts_checked")
    assert (event["train_prompts"], event["duplicates"], event["evaluation_prompts"], event["overlapping"]) == (
        40,
        0,
        5,
        0,
    )
