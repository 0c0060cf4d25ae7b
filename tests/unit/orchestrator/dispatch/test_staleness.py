"""The exit of the staleness window: invariant 2, orders and policies."""

from random import Random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.dispatch.staleness import Gate, Pool
from rollout.types.dispatch import Dispatch
from rollout.types.prompts import Prompt
from rollout.types.trajectory import FinishReason, GroupHeader, TrajectoryHeader
from rollout.types.weights import PolicyVersion

Policy = Literal["drop", "mask", "wait"]


def header(number: int, *versions: int) -> GroupHeader:
    tokens = tuple((PolicyVersion(1, v), 4) for v in versions)
    trajectory = TrajectoryHeader(
        trajectory_id=f"d{number:08d}-0",
        num_tokens=8,
        num_sampled=4 * len(versions),
        tokens_by_policy=tokens,
        reward=1.0,
        finish_reason=FinishReason.STOP,
    )
    return GroupHeader(
        dispatch_id=f"d{number:08d}",
        prompt_id="p",
        pass_index=0,
        replica=0,
        trajectories=(trajectory,),
        generation_s=0.1,
        reward_s=0.0,
        num_bytes=100,
    )


def running(number: int, version: int) -> Dispatch:
    prompt = Prompt(prompt_id="p", pass_index=0, text="1+1=")
    return Dispatch(
        dispatch_id=f"d{number:08d}",
        prompt=prompt,
        group_size=1,
        attempt=1,
        policy=PolicyVersion(1, version),
        replica=0,
        created_at_s=0.0,
    )


def pool(ready: list[GroupHeader], active: list[Dispatch] | None = None) -> Pool:
    made = Pool()
    made.start(active or [])
    made.finish(ready)
    return made


def gate(
    eta: int, batch: int, policy: Policy = "drop", order: Literal["ready", "dispatch"] = "ready", window: int = 1
) -> Gate:
    return Gate(max_staleness=eta, batch_groups=batch, policy=policy, order=order, dispatch_window=window)


@settings(max_examples=300)
@given(
    eta=st.integers(0, 4),
    batch=st.integers(1, 4),
    policy=st.sampled_from(["drop", "mask", "wait"]),
    order=st.sampled_from(["ready", "dispatch"]),
    groups=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True), max_size=12),
    trainer=st.integers(6, 9),
)
def test_no_token_older_than_eta_is_trained_on(
    eta: int, batch: int, policy: Policy, order: Literal["ready", "dispatch"], groups: list[list[int]], trainer: int
) -> None:
    """Invariant 2: under `drop` and `wait` by the choice of groups; under `mask` each group keeps a token that is young
    enough."""
    chosen = gate(eta, batch, policy, order).select(
        pool([header(i, *sorted(v)) for i, v in enumerate(groups)]), trainer, trainer
    )
    for group in chosen.batch:
        if policy == "mask":
            assert any(trainer - p.version <= eta for p in group.policies)
        else:
            assert trainer - group.oldest_version <= eta
    assert not {g.dispatch_id for g in chosen.batch} & {g.dispatch_id for g in chosen.stale}
    assert len(chosen.batch) in (0, batch)
    assert bool(chosen.batch) != bool(chosen.waits_for)


def test_drop_rejects_a_group_with_one_token_too_old() -> None:
    chosen = gate(2, 1).select(pool([header(0, 2, 3), header(1, 3)]), trainer_version=5, committed_version=5)
    assert [g.dispatch_id for g in chosen.stale] == ["d00000000"]
    assert [g.dispatch_id for g in chosen.batch] == ["d00000001"]


def test_mask_keeps_a_group_while_one_token_is_young_enough() -> None:
    chosen = gate(2, 1, "mask").select(pool([header(0, 2, 3)]), trainer_version=5, committed_version=5)
    assert [g.dispatch_id for g in chosen.batch] == ["d00000000"]
    assert gate(2, 1, "mask").select(pool([header(0, 1, 2)]), 5, 5).stale


def test_wait_delays_the_step_that_would_make_a_running_group_too_old() -> None:
    ready = [header(0, 3), header(1, 4)]
    chosen = gate(2, 2, "wait").select(pool(ready, [running(9, 3)]), trainer_version=5, committed_version=5)
    assert not chosen.batch and "d00000009" in chosen.waits_for
    assert gate(2, 2, "wait").select(pool(ready, [running(9, 4)]), trainer_version=5, committed_version=5).batch


def test_wait_takes_the_oldest_token_first() -> None:
    chosen = gate(4, 2, "wait").select(
        pool([header(0, 5), header(1, 4), header(2, 3)]), trainer_version=5, committed_version=5
    )
    assert [g.dispatch_id for g in chosen.batch] == ["d00000002", "d00000001"]


def test_ready_order_takes_what_finished_first() -> None:
    chosen = gate(2, 2).select(pool([header(5, 5), header(1, 5), header(0, 5)]), trainer_version=5, committed_version=5)
    assert [g.dispatch_id for g in chosen.batch] == ["d00000005", "d00000001"]


def test_dispatch_order_waits_for_the_oldest_dispatch() -> None:
    late = pool([header(1, 5), header(2, 5)], [running(0, 5)])
    assert not gate(2, 2, order="dispatch").select(late, 5, 5).batch
    assert [g.dispatch_id for g in gate(2, 2, order="dispatch", window=2).select(late, 5, 5).batch] == [
        "d00000001",
        "d00000002",
    ]


def test_groups_of_an_uncommitted_version_are_held() -> None:
    chosen = gate(2, 1).select(pool([header(0, 4, 5)]), trainer_version=5, committed_version=4)
    assert not chosen.batch and not chosen.stale


def test_a_version_ahead_of_the_trainer_is_an_error() -> None:
    """A version counter that went backwards shows as negative staleness; it must not pass as fresh."""
    with pytest.raises(ValueError, match="versions went backwards"):
        gate(2, 1).select(pool([header(0, 7)]), trainer_version=5, committed_version=5)


def test_groups_of_a_replica_that_is_not_verified_for_their_policy_are_held():
    """A straggler may sample under weights that nobody has checked yet."""
    ready = pool([header(0, 1), header(1, 1), header(2, 1)])
    drop = Gate(max_staleness=2, batch_groups=2, policy="drop", order="ready")
    held = drop.select(ready, 1, 1, {"d00000000"})
    assert [each.dispatch_id for each in held.batch] == ["d00000001", "d00000002"]
    assert not drop.select(ready, 1, 1, {"d00000000", "d00000001"}).batch


def finish(made: Pool, dispatch: Dispatch) -> None:
    """A running group becomes ready, wholly sampled under the policy it was dispatched under."""
    made.finish([header(int(dispatch.dispatch_id[1:]), dispatch.policy.version)])


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_wait_takes_the_oldest_batch_where_more_groups_than_it_holds_are_at_their_last_step(batch: int) -> None:
    """As a resume with a smaller batch or window finds them; waiting could save none of those left over, which the
    step makes stale."""
    over = pool([header(i, 3) for i in range(4)], [running(9, 3)])
    chosen = gate(2, batch, "wait").select(over, trainer_version=5, committed_version=5)
    assert [g.dispatch_id for g in chosen.batch] == [f"d{i:08d}" for i in range(batch)]
    over.drop(g.dispatch_id for g in chosen.batch)
    after = gate(2, batch, "wait").select(over, trainer_version=6, committed_version=6)
    assert [g.dispatch_id for g in after.stale] == [f"d{i:08d}" for i in range(batch, 4)]


def test_wait_holds_the_step_for_a_group_that_the_ledger_still_holds() -> None:
    held = pool([header(0, 3, 5), header(1, 4), header(2, 4)])
    waiting = gate(2, 2, "wait").select(held, trainer_version=5, committed_version=4)
    assert not waiting.batch and "d00000000" in waiting.waits_for
    chosen = gate(2, 2, "wait").select(held, trainer_version=5, committed_version=5)
    assert [g.dispatch_id for g in chosen.batch] == ["d00000000", "d00000001"]


VERSIONS = st.lists(st.integers(4, 8), min_size=1, max_size=3, unique=True)


@settings(max_examples=500)
@given(
    eta=st.integers(0, 4),
    batch=st.integers(1, 4),
    policy=st.sampled_from(["drop", "mask", "wait"]),
    order=st.sampled_from(["ready", "dispatch"]),
    groups=st.lists(VERSIONS, max_size=10),
    active=st.lists(st.integers(4, 8), max_size=6),
    committed=st.integers(4, 8),
    draw=st.randoms(use_true_random=False),
)
def test_no_wait_outlasts_what_runs(
    eta: int,
    batch: int,
    policy: Policy,
    order: Literal["ready", "dispatch"],
    groups: list[list[int]],
    active: list[int],
    committed: int,
    draw: Random,
) -> None:
    """Whatever is ready, runs or is held, and in whatever order it finishes: while a whole batch is usable, a wait is
    for a group that may still be in it, and it is over when nothing runs any more."""
    made = pool(
        [header(i, *sorted(v)) for i, v in enumerate(groups)], [running(50 + i, v) for i, v in enumerate(active)]
    )
    rule, trainer = gate(eta, batch, policy, order), 8
    while not (selection := rule.select(made, trainer, committed)).batch:
        made.drop(g.dispatch_id for g in selection.stale)
        if not made.running and committed == trainer:
            break
        everything = Pool(ready=dict(made.ready))
        for dispatch in made.running.values():
            finish(everything, dispatch)
        at_the_end = rule.select(everything, trainer, trainer)
        usable_now = {h.dispatch_id for h in made.ready.values() if h.newest.version <= committed}
        if policy == "wait" and len(usable_now) >= batch:
            assert {g.dispatch_id for g in at_the_end.batch} - usable_now, "a wait for what cannot join the batch"
        if made.running and draw.random() < 0.7:
            finish(made, made.running[draw.choice(sorted(made.running))])
        else:
            committed = min(trainer, committed + 1)
    assert selection.batch or len(made.ready) < batch


@settings(max_examples=300)
@given(
    eta=st.integers(0, 4),
    batch=st.integers(1, 4),
    groups=st.lists(VERSIONS, max_size=10),
    active=st.lists(st.integers(4, 8), max_size=6),
    committed=st.integers(4, 8),
)
def test_wait_leaves_a_group_to_become_stale_only_where_the_batch_is_full_of_such(
    eta: int, batch: int, groups: list[list[int]], active: list[int], committed: int
) -> None:
    trainer = 8
    made = pool(
        [header(i, *sorted(v)) for i, v in enumerate(groups)], [running(50 + i, v) for i, v in enumerate(active)]
    )
    chosen = gate(eta, batch, "wait").select(made, trainer, committed)
    taken, floor = {g.dispatch_id for g in chosen.batch}, trainer - eta
    last_chance = [h.dispatch_id for h in made.ready.values() if h.oldest_version == floor]
    last_chance += [d.dispatch_id for d in made.running.values() if d.policy.version == floor]
    if taken and set(last_chance) - taken:
        assert all(g.oldest_version == floor for g in chosen.batch)
