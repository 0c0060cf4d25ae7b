"""A gap that grows over the versions while every audit passes."""

from collections.abc import Sequence

from support.builders import BASE

from orchestrator.loop.audit_trends import LEAST_VERSIONS, GapDrift
from rollout.types.weights import PolicyVersion
from trainer.consistency.service.report import ReplicaGap

RISING = [1e-3 * (1 + version) for version in range(LEAST_VERSIONS)]


def gap(version: int, mean_abs: float, replica: int = 0, num_tokens: int = 100) -> ReplicaGap:
    return ReplicaGap(
        replica=replica,
        newest=PolicyVersion(BASE.trainer_epoch, version),
        engine="torch",
        num_tokens=num_tokens,
        mean_abs=mean_abs,
        mean_abs_limit=0.05,
        max_abs=mean_abs,
        k3=0.0,
        ess=1.0,
        outside_factor_two=0.0,
        findings=(),
        attribution=None,
    )


def told(drift: GapDrift, means: Sequence[float], start: int = 0, incarnation: int = 0) -> list[int]:
    """Versions at which a drift is told."""
    return [start + i for i, mean in enumerate(means) if drift.take(gap(start + i, mean), incarnation) is not None]


def test_a_rise_is_told_once_when_there_are_versions_enough():
    assert told(GapDrift(), [*RISING, 0.02, 0.021]) == [LEAST_VERSIONS - 1]


def test_a_flat_gap_is_never_told_and_a_rise_after_it_again():
    drift = GapDrift()
    assert told(drift, RISING) == [LEAST_VERSIONS - 1]
    assert told(drift, [0.01] * 60, start=LEAST_VERSIONS) == []
    assert told(drift, [0.01 + 0.002 * i for i in range(20)], start=200)[:1] == [208]


def test_audits_of_one_version_are_one_reading_by_their_tokens():
    drift = GapDrift()
    for mean in RISING:
        assert drift.take(gap(0, mean), 0) is None
    assert drift.take(gap(1, 0.5, num_tokens=0), 0) is None


def test_a_new_incarnation_and_another_replica_start_anew():
    drift = GapDrift()
    assert told(drift, RISING[:-1]) == []
    assert told(drift, RISING[-1:], start=LEAST_VERSIONS - 1, incarnation=1) == []
    assert drift.take(gap(LEAST_VERSIONS, 1.0, replica=1), 0) is None
