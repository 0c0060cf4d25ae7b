"""The doctor inside the loop: it looks every few steps, tells a new primary finding once, and its own trouble never ends the training."""

import asyncio
from typing import Any

from doctor_runs import healthy

from orchestrator.doctor.causes import Cause
from orchestrator.live_doctor import EVERY_STEPS, MAX_EVENTS, LiveDoctor
from orchestrator.metrics_system import NO_CAUSE
from orchestrator.snapshot import Snapshot
from rollout.dispatch import Counts


class Told:
    """Run events that were recorded."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    async def record(self, kind: str, fields: dict[str, str | int | float | bool | None]) -> None:
        self.events.append((kind, fields))


def shown(doctor: LiveDoctor) -> tuple[dict[str, float], list[str]]:
    """Worst finding by layer, and the causes that are said to be primary."""
    numbers = Snapshot(numbers=doctor.numbers(), distributions={}).numbers
    primary = numbers["concord_diagnosis_primary"]
    assert set(primary) == {(cause,) for cause in (*Cause, NO_CAUSE)}
    return {layer: rank for (layer,), rank in numbers["concord_diagnosis"].items()}, [cause for (cause,), is_primary in primary.items() if is_primary]


def test_every_layer_is_shown_before_the_first_look():
    assert shown(LiveDoctor(Told().record)) == ({"1": 0.0, "2": 0.0, "3": 0.0, "4": 0.0}, [NO_CAUSE])


def test_a_healthy_loop_records_no_diagnosis():
    told = Told()
    doctor = LiveDoctor(told.record)
    for row in healthy(0).rows:
        doctor.step(row, Counts(), [])
    asyncio.run(doctor.look())
    assert told.events == []
    assert shown(doctor) == ({"1": 1.0, "2": 0.0, "3": 0.0, "4": 0.0}, [NO_CAUSE]), "solved, which is info"


def test_a_new_primary_finding_is_told_once_and_exported():
    told = Told()
    doctor = LiveDoctor(told.record)
    for row in healthy(0).rows:
        doctor.step(row, Counts(), [])
    doctor.event("consistency_finding", {"cause": "version_tag", "replica": 0, "gap_nats": 0.2, "explained": 1.0, "codes": "gap_mean", "detail": "x"})
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
    doctor.event("consistency_finding", {"cause": "version_tag", "replica": 0, "gap_nats": 0.2, "explained": 1.0, "codes": "gap_mean", "detail": "x"})
    for _ in range(MAX_EVENTS):
        doctor.event("evaluation", {"score": None})
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
    doctor.event("consistency_finding", {"cause": "version_tag", "replica": 0, "gap_nats": 0.2, "explained": 1.0, "codes": "gap_mean", "detail": "x"})
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
    doctor._rows.append({"step": float("nan")})
    asyncio.run(doctor.look())
    asyncio.run(doctor.look())
    assert [kind for kind, _ in told.events] == ["doctor_failed"]
    assert doctor.numbers() == {}, "what it said before is old"
