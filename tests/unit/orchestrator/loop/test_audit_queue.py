"""What is audited, and in which company: no call to the service mixes two incarnations of a replica."""

import asyncio
from collections.abc import Iterable

import pytest
from support.loop.group_headers import header

from orchestrator.dispatch.staleness import Pool
from orchestrator.loop.audit_queue import BASELINE_GROUPS, MAX_WAITING, AuditQueue
from rollout.types.trajectory import GroupHeader
from rollout.types.weights import PolicyVersion
from trainer.config.consistency import ConsistencyConfig

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)


def queue_of(mode: str, headers: Iterable[GroupHeader], *, fraction: float = 1e-9, known: bool = True) -> AuditQueue:
    pool = Pool()
    pool.finish(headers)
    config = ConsistencyConfig.model_validate({"mode": mode, "audit_fraction": fraction})
    return AuditQueue(config, 7, pool, [V0], lambda replica: known)


def taken(queue: AuditQueue) -> list[str]:
    """The ids of the next call; none where it would wait."""

    async def take() -> list[str]:
        taking = asyncio.ensure_future(queue.take())
        await asyncio.sleep(0)
        found = [each.dispatch_id for each in taking.result()] if taking.done() else []
        taking.cancel()
        return found

    return asyncio.run(take())


def test_groups_of_two_incarnations_of_a_replica_do_not_go_in_one_call():
    """A gap is of one incarnation: what it says of a replica that is gone must not be said of its successor."""
    headers = [header("a", incarnation=1), header("b", incarnation=2), header("c", incarnation=1)]
    queue = queue_of("gate", headers)
    assert (taken(queue), taken(queue), taken(queue)) == (["a", "c"], ["b"], [])


def test_groups_of_a_version_that_the_ledger_does_not_hold_wait():
    queue = queue_of("gate", [header("a", policy=V1), header("b")])
    assert (taken(queue), taken(queue)) == (["b"], [])
    queue.version_committed(V1, ())
    assert taken(queue) == ["a"]


def test_what_was_put_back_comes_first():
    queue = queue_of("audit", [header(name) for name in "abc"], fraction=1.0)
    queue.put_back([header("z")])
    assert taken(queue) == ["z", "a", "b", "c"]


@pytest.mark.parametrize(("known", "expected"), [(False, BASELINE_GROUPS), (True, 0)])
def test_mode_audit_takes_a_few_groups_of_a_replica_without_a_baseline(known: bool, expected: int):
    queue = queue_of("audit", [header(f"d{n}") for n in range(20)], known=known)
    assert len(queue) == expected


def test_mode_audit_lets_the_oldest_go_and_counts_them():
    queue = queue_of("audit", [header(f"d{n:03d}") for n in range(MAX_WAITING + 5)], fraction=1.0)
    assert (len(queue), queue.skipped, taken(queue)[0]) == (MAX_WAITING, 5, "d005")
