"""What is known of a slot over its incarnations."""

from orchestrator.replicas.replica import Replica


def test_a_failed_canary_is_still_counted_when_the_replica_that_gave_it_is_gone():
    """Its gap goes with the incarnation, within seconds and perhaps between two scrapes."""
    replica = Replica(0)
    replica.tolerance_nats = 0.1
    assert replica.is_verified(0.05)
    assert not replica.is_verified(0.5)
    assert not replica.is_verified(float("nan"))
    replica.goes()
    assert (replica.tag, replica.canary_failures) == (None, 2)
