"""The doctor inside the loop: it looks every few steps, tells a new primary finding once, and its own trouble never
ends the training."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from support.loop.doctor_runs import MadeUpRun, healthy, rescore

from orchestrator.doctor.diagnosis import diagnose
from orchestrator.loop.live_doctor import EVERY_STEPS, FIRST_ROWS, MAX_EVENTS, MAX_ROWS, LiveDoctor
from orchestrator.metrics.causes import Cause
from orchestrator.metrics.snapshot import Snapshot
from orchestrator.metrics.system import NO_CAUSE
from orchestrator.run_dir.history import History
from rollout.types.dispatch import Counts
from rollout.types.protocols import EventFields


class Told:
    """Run events that were recorded."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    async def record(self, kind: str, fields: EventFields) -> None:
        self.events.append((kind, dict(fields)))


def shown(doctor: LiveDoctor) -> tuple[dict[str, float], list[str]]:
    """Worst finding by layer, and the causes that are said to be primary."""
    numbers = Snapshot(numbers=doctor.numbers(), distributions={}).numbers
    primary = numbers["concord_diagnosis_primary"]
    assert set(primary) == {(cause,) for cause in (*Cause, NO_CAUSE)}
    return {layer: rank for (layer,), rank in numbers["concord_diagnosis"].items()}, [
        cause for (cause,), is_primary in primary.items() if is_primary
    ]


def test_every_layer_is_shown_before_the_first_look():
    assert shown(LiveDoctor(Told().record)) == ({"1": 0.0, "2": 0.0, "3": 0.0, "4": 0.0}, [NO_CAUSE])


def test_groups_that_fail_before_any_step_are_diagnosed_at_once():
    told = Told()

    async def main() -> None:
        doctor = LiveDoctor(told.record, lambda: History(dispatched=48, failed={"engine": 48}, in_a_row=48))
        task = asyncio.create_task(doctor.run())
        doctor.event_recorded("groups_failing", {"failures": 48})
        for _ in range(3):
            await asyncio.sleep(0)
        assert doctor.numbers()["concord_learning_state"] == {("open",): 0.0, ("solved",): 0.0, ("not_learning",): 1.0}
        task.cancel()

    asyncio.run(main())
    assert [(fields["cause"], fields["severity"]) for _, fields in told.events] == [("engine_failures", "critical")]


def test_a_healthy_loop_records_no_diagnosis():
    told = Told()
    doctor = LiveDoctor(told.record)
    for row in healthy(0).rows:
        doctor.step(row, Counts(), [])
    asyncio.run(doctor.look())
    assert told.events == []
    assert shown(doctor) == ({"1": 1.0, "2": 0.0, "3": 0.0, "4": 0.0}, [NO_CAUSE]), "solved, which is info"


def collapsed(run: MadeUpRun) -> None:
    """From step 301 on nothing moves, and nothing is right."""
    for name, value in (("reward_mean", 0.0), ("policy_entropy", 0.0), ("all_correct_groups", 0.0), ("approx_kl", 0.0)):
        run.set(name, lambda t, value=value: value, since=300)
    for name in ("all_wrong_groups", "zero_variance_groups"):
        run.set(name, lambda t: 1.0, since=300)
    run.rows[300]["approx_kl"] = 5.1


def vanished(run: MadeUpRun) -> None:
    """From step 301 on the gradient is nearly nothing; nothing is evaluated."""
    run.events.clear()
    run.set("zero_variance_groups", lambda t: 0.2)
    run.set("grad_norm", lambda t: 1e-5, since=300)


def too_hard(run: MadeUpRun) -> None:
    """From the start nothing is right."""
    for name, value in (
        ("reward_mean", 0.01),
        ("all_correct_groups", 0.0),
        ("all_wrong_groups", 0.98),
        ("zero_variance_groups", 0.98),
    ):
        run.set(name, lambda t, value=value: value)
    rescore(run, lambda t: 0.01)


def detached(run: MadeUpRun) -> None:
    """The reward rises once, early; the evaluation never does."""
    run.set("reward_mean", lambda t: 0.3 + 0.5 * min(1.0, 4 * t))
    for name in ("all_correct_groups", "zero_variance_groups"):
        run.set(name, lambda t: 0.1)
    run.set("all_wrong_groups", lambda t: 0.05)
    rescore(run, lambda t: 0.3)


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        (collapsed, Cause.POLICY_COLLAPSE),
        (vanished, Cause.GRADIENT_COLLAPSE),
        (too_hard, Cause.HARD_PROMPTS),
        (detached, Cause.REWARD_DETACHED),
    ],
)
def test_what_went_wrong_early_stays_found_however_long_the_loop_goes_on(
    trouble: Callable[[MadeUpRun], None], cause: Cause
):
    run, told = healthy(0, 1500), Told()
    trouble(run)
    whole = diagnose(run.record())
    assert whole.primary is not None and whole.primary.cause is cause
    doctor = LiveDoctor(told.record)
    events = {event.step: event for event in run.events}

    async def main() -> None:
        for row in run.rows:
            doctor.step(row, Counts(), [])
            if (event := events.get(int(row["step"]))) is not None:
                doctor.event_recorded(event.kind, cast(EventFields, event.fields))
            if row["step"] % 50 == 0:
                await doctor.look()

    asyncio.run(main())
    assert doctor.diagnosis is not None and doctor.diagnosis.primary is not None
    live = doctor.diagnosis.primary
    assert (live.cause, live.severity, live.since) == (cause, whole.primary.severity, whole.primary.since)
    assert told.events[-1][1]["cause"] == cause, "it was never taken back"
    assert doctor.diagnosis.steps <= FIRST_ROWS + MAX_ROWS + 100


def test_a_slow_rise_is_no_leap_where_rows_are_missing():
    """Rows in the middle are gone: KL there went slowly from little to much, while the reward was lost for another
    reason."""
    run = healthy(0, 1500)
    run.set("approx_kl", lambda t: 0.005 + 0.6 * t)
    run.set("policy_entropy", lambda t: 0.5)
    run.set("reward_mean", lambda t: 0.5 - 0.45 * t)
    doctor = LiveDoctor(Told().record)
    for row in run.rows:
        doctor.step(row, Counts(), [])
    asyncio.run(doctor.look())
    assert doctor.diagnosis is not None and doctor.diagnosis.steps == FIRST_ROWS + MAX_ROWS
    assert not [f for f in doctor.diagnosis.findings if f.cause is Cause.POLICY_COLLAPSE]


def test_a_new_primary_finding_is_told_once_and_exported():
    told = Told()
    doctor = LiveDoctor(told.record)
    for row in healthy(0).rows:
        doctor.step(row, Counts(), [])
    doctor.event_recorded(
        "consistency_finding",
        {"cause": "version_tag", "replica": 0, "gap_nats": 0.2, "explained": 1.0, "codes": "gap_mean", "detail": "x"},
    )
    asyncio.run(doctor.look())
    asyncio.run(doctor.look())
    assert [(kind, fields["cause"], fields["diagnosis_layer"], fields["severity"]) for kind, fields in told.events] == [
        ("diagnosis", "version_tag", 4, "critical")
    ]
    assert shown(doctor) == ({"1": 1.0, "2": 0.0, "3": 0.0, "4": 3.0}, ["version_tag"])


def test_many_events_of_one_kind_displace_no_other_kind():
    told = Told()
    doctor = LiveDoctor(told.record)
    for row in healthy(0).rows:
        doctor.step(row, Counts(), [])
    doctor.event_recorded(
        "consistency_finding",
        {"cause": "version_tag", "replica": 0, "gap_nats": 0.2, "explained": 1.0, "codes": "gap_mean", "detail": "x"},
    )
    for _ in range(MAX_EVENTS):
        doctor.event_recorded("evaluation", {"score": None})
    asyncio.run(doctor.look())
    assert [fields["cause"] for _, fields in told.events] == ["version_tag"]


def test_failures_come_from_the_counts_of_the_loop():
    told = Told()
    doctor = LiveDoctor(told.record)
    for index, row in enumerate(healthy(0).rows):
        doctor.step(row, Counts(failed=(("reward_raised", 5 * index),)), [])
    asyncio.run(doctor.look())
    assert [fields["cause"] for _, fields in told.events] == ["reward_failures"]


def test_every_layer_with_a_finding_is_shown_and_the_primary_one_named():
    doctor = LiveDoctor(Told().record)
    for index, row in enumerate(healthy(0).rows):
        doctor.step(row, Counts(failed=(("reward_raised", 5 * index),)), [])
    doctor.event_recorded(
        "consistency_finding",
        {"cause": "version_tag", "replica": 0, "gap_nats": 0.2, "explained": 1.0, "codes": "gap_mean", "detail": "x"},
    )
    asyncio.run(doctor.look())
    assert shown(doctor) == ({"1": 2.0, "2": 0.0, "3": 0.0, "4": 3.0}, ["reward_failures"])


def test_it_looks_every_few_steps_by_itself():
    told = Told()

    async def main() -> None:
        doctor = LiveDoctor(told.record)
        task = asyncio.create_task(doctor.run())
        for row in healthy(0).rows[: EVERY_STEPS - 1]:
            doctor.step(row, Counts(), [])
        for _ in range(3):
            await asyncio.sleep(0)
        assert doctor.diagnosis is None
        doctor.step(healthy(0).rows[EVERY_STEPS - 1], Counts(), [])
        for _ in range(3):
            await asyncio.sleep(0)
        assert doctor.diagnosis is not None
        assert doctor.diagnosis.last_step == EVERY_STEPS
        task.cancel()

    asyncio.run(main())


def test_its_own_trouble_is_told_once_and_ends_nothing():
    told = Told()
    doctor = LiveDoctor(told.record)
    doctor.step({"step": 1.0}, Counts(), [])
    doctor._newest.append(({"step": float("nan")}, {}))
    asyncio.run(doctor.look())
    asyncio.run(doctor.look())
    assert [kind for kind, _ in told.events] == ["doctor_failed"]
    assert doctor.numbers() == {}, "what it said before is old"
