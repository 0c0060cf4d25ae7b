"""What a step's batch is reduced to."""

from dataclasses import replace

import pytest
from support.loop.group_headers import V0, header

from orchestrator.dispatch.accounts import Accounts, step_facts
from rollout.types.trajectory import FinishReason, GroupHeader
from rollout.types.weights import PolicyVersion
from trainer.types.step import StepReport, StepRequest

REQUEST = StepRequest(policy=PolicyVersion(1, 1), oldest_version=0)


def ended(number: int, reason: FinishReason, tokens: int) -> GroupHeader:
    group = header(f"d-{number}")
    trajectory = replace(
        group.trajectories[0], finish_reason=reason, num_sampled=tokens, tokens_by_policy=((V0, tokens),)
    )
    return replace(group, trajectories=(trajectory,))


def test_answers_that_end_by_length_below_the_limit_are_counted_apart():
    batch = [
        ended(0, FinishReason.LENGTH, 8),
        ended(1, FinishReason.LENGTH, 3),
        ended(2, FinishReason.STOP, 3),
        ended(3, FinishReason.LENGTH, 5),
    ]
    ids = frozenset(one.trajectories[0].trajectory_id for one in batch)
    report = StepReport(
        policy=REQUEST.policy,
        loss=0.0,
        grad_norm=1.0,
        learning_rate=1e-3,
        num_tokens=4,
        num_tokens_forwarded=4,
        num_micro_batches=1,
        trained_ids=ids,
    )
    facts = step_facts(batch, report, REQUEST, max_new_tokens=8)
    assert (facts.length_cap_fraction, facts.length_cut_fraction) == (0.75, 0.5)


def test_seconds_of_store_calls_add_up_over_calls():
    accounts = Accounts(8)
    accounts.store_answered("reject", 0.5)
    accounts.store_answered("dispatch", 0.25)
    assert accounts.store_s == pytest.approx(0.75)
