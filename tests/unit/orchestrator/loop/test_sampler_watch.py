"""What the audits of a replica say about its sampler, over time."""

from support.builders import BASE

from orchestrator.loop.audit_trends import SamplerFault, SamplerFinding, SamplerWatch
from trainer.consistency.checks.sampling import SamplingSums
from trainer.consistency.service.report import ReplicaGap

AS_DECLARED = SamplingSums(num_tokens=100, excess=1.0, variance=50.0)
SHARP = SamplingSums(num_tokens=100, excess=-20.0, variance=50.0)
REPEATING = SamplingSums(
    num_tokens=100, variance=50.0, num_compared=7, repeats=5, expected_repeats=0.5, repeat_evidence=11.0
)


def gap(sampling: SamplingSums, replica: int = 0) -> ReplicaGap:
    return ReplicaGap(
        replica=replica,
        newest=BASE,
        engine="torch",
        num_tokens=sampling.num_tokens,
        mean_abs=0.0,
        mean_abs_limit=0.05,
        max_abs=0.0,
        k3=0.0,
        ess=1.0,
        outside_factor_two=0.0,
        findings=(),
        attribution=None,
        sampling=sampling,
    )


def taken(watch: SamplerWatch, sums: SamplingSums, times: int, incarnation: int = 0) -> list[SamplerFinding]:
    return [found for _ in range(times) for found in watch.take(gap(sums), incarnation)]


def test_a_sampler_as_declared_is_never_reported():
    watch = SamplerWatch(20.0)
    assert watch.evidence is None
    assert taken(watch, AS_DECLARED, 500) == []
    assert (watch.evidence or 0.0) < 20.0


def test_a_sharper_sampler_is_reported_once_a_crossing_with_its_temperature():
    watch = SamplerWatch(20.0)
    taken(watch, AS_DECLARED, 50)
    found = taken(watch, SHARP, 6)
    assert [one.fault for one in found] == [SamplerFault.OTHER_DISTRIBUTION]
    assert found[0].sums.inverse_temperature == 1.4
    assert "0.71 times the declared one" in found[0].detail
    assert found[0].sums.num_tokens == 500


def test_repeats_are_reported_beside_it():
    found = taken(SamplerWatch(20.0), REPEATING, 2)
    assert [one.fault for one in found] == [SamplerFault.REPEATED_SAMPLES]
    assert "10 of 14 samples repeat" in found[0].detail
    assert "1.0 expected" in found[0].detail


def test_a_new_incarnation_starts_anew_and_each_replica_has_charts_of_its_own():
    watch = SamplerWatch(20.0)
    assert taken(watch, SHARP, 4) == []
    assert taken(watch, SHARP, 4, incarnation=1) == []
    assert watch.take(gap(SHARP, replica=1), 0) == []


def test_without_a_threshold_nothing_is_added_up():
    watch = SamplerWatch(None)
    assert taken(watch, SHARP, 50) == []
    assert watch.evidence is None
