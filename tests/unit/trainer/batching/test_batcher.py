"""From audited groups to loss tokens: which tokens, at which position, with which weight."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from support.builders import build_dispatch, build_evidence, build_group, build_trajectory
from support.trainer.search_evidence import build_culprit, build_search

from rollout.errors import UserError
from rollout.types.trajectory import LogprobSemantics, TrajectoryGroup, VersionSpan
from rollout.types.weights import PolicyVersion
from trainer.algorithms.grpo import Grpo
from trainer.algorithms.registry import build_algorithm
from trainer.batching.batcher import GroupRules, TrainingBatch, build_batch
from trainer.batching.packing import pack
from trainer.batching.quarantine import quarantined
from trainer.config.trainer import AlgorithmConfig, GrpoConfig, GspoConfig, RlooConfig
from trainer.loss.policy_loss import loss_tokens
from trainer.types.evidence import AuditedGroup, decode_evidence
from trainer.types.gradloc import Acted
from trainer.types.step import OldLogprobSource, Verdict

V1, V2, V3 = (PolicyVersion(1, version) for version in (1, 2, 3))


def audited(group: TrajectoryGroup, *verdicts: Verdict) -> AuditedGroup:
    return AuditedGroup(group=group, evidence=build_evidence(group, verdicts) if verdicts else None)


def batch(groups: Sequence[AuditedGroup], oldest: int = 0, aggregation: Any = "token_mean") -> TrainingBatch:
    return build_batch(groups, build_algorithm(GrpoConfig()), oldest, aggregation)


def with_tag(group: TrajectoryGroup, index: int, **changes: Any) -> TrajectoryGroup:
    trajectories = list(group.trajectories)
    trajectories[index] = replace(trajectories[index], tag=replace(trajectories[index].tag, **changes))
    return replace(group, trajectories=tuple(trajectories))


def test_every_sampled_token_is_in_the_loss_with_the_rollouts_logprob():
    group = build_group(rewards=(1.0, 0.0))
    for sample, trajectory in zip(batch([audited(group)]).samples, group.trajectories, strict=True):
        np.testing.assert_array_equal(sample.loss_mask, trajectory.sampled)
        np.testing.assert_array_equal(sample.old_logprobs, trajectory.rollout_logprobs)
        assert sample.old_logprob_source is OldLogprobSource.ROLLOUT


def test_the_first_token_is_never_in_the_loss():
    group = build_group(prompt_tokens=0)
    built = batch([audited(group)])
    assert all(not sample.loss_mask[0] and sample.loss_mask[1:].all() for sample in built.samples)
    assert built.masked_ids == {"d-0/0", "d-0/1"}


def test_tokens_older_than_the_floor_leave_the_loss_by_token_not_by_neighbour():
    """Spans name positions of tokens; a shift by one would take the last fresh token or leave the last stale one."""
    group = build_group(prompt_tokens=4, spans=((V1, 3), (V2, 2), (V3, 1)))
    sample = batch([audited(group)], oldest=2).samples[0]
    assert np.flatnonzero(sample.loss_mask).tolist() == [7, 8, 9]
    assert not sample.old_logprobs[:7].any()
    assert sample.old_logprobs[7:].all()
    assert batch([audited(group)], oldest=3).samples[0].loss_mask.nonzero()[0].tolist() == [9]


def test_a_trajectory_without_tokens_left_is_masked_and_gone():
    stale, fresh = build_group(build_dispatch(0), spans=((V1, 4),)), build_group(build_dispatch(1), spans=((V3, 4),))
    built = batch([audited(stale), audited(fresh)], oldest=2)
    assert {sample.trajectory_id for sample in built.samples} == {"d-1/0", "d-1/1"}
    assert built.masked_ids == {"d-0/0", "d-0/1"}
    assert built.num_tokens == 8


def test_token_mean_weighs_every_term_of_the_batch_alike():
    groups = [audited(build_group(build_dispatch(n), spans=((V1, length),))) for n, length in enumerate((2, 9))]
    built = batch(groups)
    assert built.num_tokens == 22
    assert {sample.token_weight for sample in built.samples} == {1 / 22}


def test_sequence_mean_weighs_every_trajectory_alike():
    groups = [audited(build_group(build_dispatch(n), spans=((V1, length),))) for n, length in enumerate((2, 9))]
    built = batch(groups, aggregation="sequence_mean")
    for sample in built.samples:
        assert sample.token_weight * np.count_nonzero(sample.loss_mask) == pytest.approx(1 / 4)


def test_groups_of_alike_rewards_stay_in_the_denominator_and_are_counted():
    built = batch(
        [audited(build_group(build_dispatch(0), rewards=(1.0, 1.0))), audited(build_group(build_dispatch(1)))]
    )
    assert built.zero_variance_groups == 1
    assert [sample.advantages.any() for sample in built.samples[:2]] == [False, False]
    assert built.samples[2].token_weight == 1 / 32


def numbers(built: TrainingBatch) -> list[tuple[str, float, list[float], int]]:
    """What of each sample enters the loss."""
    return [
        (s.trajectory_id, s.token_weight, s.advantages.tolist(), int(np.count_nonzero(s.loss_mask)))
        for s in built.samples
    ]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("config", [GrpoConfig(), RlooConfig(), GspoConfig()], ids=lambda c: c.type)
def test_groups_without_a_difference_shrink_a_step_unless_they_are_dropped(config: AlgorithmConfig, aggregation: Any):
    """Public fault 75: with `drop` the step is that of the live groups alone; with `count` it is as much smaller as
    their share is."""
    live = [audited(build_group(build_dispatch(n), rewards=(1.0, 0.0, 0.7))) for n in range(2)]
    flat = [audited(build_group(build_dispatch(n), rewards=(0.7, 0.7, 0.7))) for n in range(2, 8)]
    mixed, algorithm = [flat[0], live[0], *flat[1:], live[1]], build_algorithm(config)
    alone = build_batch(live, algorithm, 0, aggregation)
    dropped = build_batch(
        mixed,
        algorithm,
        0,
        aggregation,
        rules=GroupRules.of(config.model_copy(update={"zero_variance_groups": "drop"})),
    )
    assert numbers(dropped) == numbers(alone)
    assert dropped.dropped_groups == {f"d-{n}" for n in range(2, 8)} and not dropped.masked_ids
    assert (dropped.zero_variance_groups, dropped.num_tokens) == (6, alone.num_tokens)
    counted = build_batch(mixed, algorithm, 0, aggregation, rules=GroupRules.of(config))
    shares = [s.token_weight for s in counted.samples if s.advantages.any()]
    np.testing.assert_allclose(shares, [s.token_weight / 4 for s in alone.samples], rtol=1e-12)
    assert not counted.dropped_groups


def test_a_batch_of_groups_without_a_difference_has_nothing_left_when_they_are_dropped():
    built = build_batch(
        [audited(build_group(rewards=(1.0, 1.0)))],
        build_algorithm(GrpoConfig()),
        0,
        "token_mean",
        rules=GroupRules(drops_zero_variance=True),
    )
    assert (built.samples, built.num_tokens, built.dropped_groups) == ((), 0, {"d-0"})


@pytest.mark.parametrize("config", [GrpoConfig(), RlooConfig(), GspoConfig()], ids=lambda c: c.type)
def test_the_baseline_can_be_that_of_the_samples_that_are_trained(config: AlgorithmConfig):
    """Public fault 76: a rejected sibling no longer shifts the others."""
    group, pair = build_group(rewards=(1.0, 0.0, 5.0)), build_group(rewards=(1.0, 0.0))
    rules = GroupRules.of(config.model_copy(update={"baseline": "trained"}))
    verdicts = (Verdict.ACCEPT, Verdict.ACCEPT, Verdict.REJECT)
    algorithm = build_algorithm(config)
    part = build_batch([audited(group, *verdicts)], algorithm, 0, "token_mean", rules=rules)
    assert numbers(part) == numbers(build_batch([audited(pair)], algorithm, 0, "token_mean"))
    whole = build_batch([audited(group, *verdicts)], algorithm, 0, "token_mean", rules=GroupRules.of(config))
    assert numbers(whole) != numbers(part)
    untouched = build_batch([audited(group)], algorithm, 0, "token_mean", rules=rules)
    assert numbers(untouched) == numbers(build_batch([audited(group)], algorithm, 0, "token_mean"))


def test_a_lone_trained_sample_has_nothing_to_be_compared_with():
    group = build_group(rewards=(1.0, 0.0, 5.0))
    verdicts = (Verdict.REJECT, Verdict.ACCEPT, Verdict.QUARANTINE)
    rules = GroupRules(baseline_of_trained=True)
    built = build_batch([audited(group, *verdicts)], build_algorithm(GrpoConfig()), 0, "token_mean", rules=rules)
    assert [(s.trajectory_id, s.advantages.any()) for s in built.samples] == [("d-0/1", False)]
    assert built.zero_variance_groups == 1


@pytest.mark.parametrize("verdict", [Verdict.REJECT, Verdict.QUARANTINE])
def test_a_refused_trajectory_leaves_the_loss_but_stays_in_its_groups_baseline(verdict: Verdict):
    group = build_group(rewards=(1.0, 0.0, 0.0))
    whole, part = batch([audited(group)]), batch([audited(group, Verdict.ACCEPT, verdict, Verdict.ACCEPT)])
    assert [sample.trajectory_id for sample in part.samples] == ["d-0/0", "d-0/2"]
    assert [sample.advantages[0] for sample in part.samples] == [whole.samples[i].advantages[0] for i in (0, 2)]
    assert part.masked_ids == {"d-0/1"}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_what_the_gradient_search_quarantined_leaves_the_loss_and_stays_in_the_denominators(
    aggregation: Literal["token_mean", "sequence_mean"],
):
    group = build_group(rewards=(1.0, 0.0, 0.0))
    culprit = build_culprit(trajectory_id=group.trajectories[1].trajectory_id)
    (out,) = quarantined([audited(group)], build_search(acted=Acted.QUARANTINED, culprits=(culprit,)))
    whole = batch([audited(group)], aggregation=aggregation)
    part = batch([AuditedGroup(group=group, evidence=decode_evidence(out.verdict))], aggregation=aggregation)
    assert [(s.trajectory_id, s.token_weight, s.advantages[0]) for s in part.samples] == [
        (s.trajectory_id, s.token_weight, s.advantages[0]) for s in whole.samples
    ]
    assert [int(np.count_nonzero(s.loss_mask)) for s in part.samples] == [8, 0, 8]
    assert (part.num_tokens, whole.num_tokens, part.masked_ids) == (16, 24, {culprit.trajectory_id})


def test_a_mask_verdict_takes_out_the_tokens_that_it_names():
    sample, other = batch([audited(build_group(prompt_tokens=4), Verdict.MASK, Verdict.ACCEPT)]).samples
    assert np.flatnonzero(sample.loss_mask).tolist() == list(range(5, 12))
    assert np.flatnonzero(other.loss_mask).tolist() == list(range(4, 12))
    assert sample.token_weight == 1 / 15  # N is counted once, after the verdicts


def test_recomputed_old_logprobs_are_those_of_the_evidence():
    group = build_group(rewards=(1.0, 0.0))
    built = build_batch(
        [AuditedGroup(group=group, evidence=build_evidence(group, shift=-0.25))],
        build_algorithm(GrpoConfig()),
        0,
        "token_mean",
        OldLogprobSource.RECOMPUTED,
    )
    for sample, trajectory in zip(built.samples, group.trajectories, strict=True):
        np.testing.assert_allclose(
            sample.old_logprobs[trajectory.sampled], trajectory.rollout_logprobs[trajectory.sampled] - 0.25, rtol=1e-6
        )
        np.testing.assert_array_equal(sample.rollout_logprobs, trajectory.rollout_logprobs)
        assert sample.old_logprob_source is OldLogprobSource.RECOMPUTED


@pytest.mark.parametrize("scored", [False, None])
def test_recomputed_old_logprobs_that_are_missing_are_an_error_not_the_rollouts(scored: bool | None):
    group = build_group()
    evidence = None if scored is None else build_evidence(group, scored=scored)
    with pytest.raises(ValueError, match="8 tokens of the loss have no recomputed log-prob"):
        build_batch(
            [AuditedGroup(group=group, evidence=evidence)],
            build_algorithm(GrpoConfig()),
            0,
            "token_mean",
            OldLogprobSource.RECOMPUTED,
        )


def test_evidence_about_another_group_is_refused():
    with pytest.raises(ValueError, match="its evidence is about"):
        AuditedGroup(group=build_group(build_dispatch(1)), evidence=build_evidence(build_group(build_dispatch(2))))


def test_the_batch_takes_the_temperature_of_its_engine_tags():
    group = with_tag(with_tag(build_group(), 0, temperature=0.7), 1, temperature=0.7)
    assert batch([audited(group)]).temperature == 0.7


class TokenAdvantages(Grpo):
    """Every token has an advantage of its own: its position, less `missing` tokens at the end."""

    def __init__(self, missing: int = 0) -> None:
        super().__init__(GrpoConfig())
        self._missing = missing

    def advantages(self, group: TrajectoryGroup) -> Any:
        return [np.arange(t.token_ids.size - self._missing, dtype=np.float32) for t in group.trajectories]


def test_an_algorithm_may_give_every_token_its_advantage():
    group = build_group(prompt_tokens=3, spans=((V1, 2), (V2, 3)))
    built = build_batch([audited(group)], TokenAdvantages(), 2, "token_mean")
    (micro,) = pack(built.samples, 1, 10_000)[0]
    assert loss_tokens(micro, torch.device("cpu")).advantages.tolist() == [5.0, 6.0, 7.0] * 2
    assert (built.advantage_std, built.zero_variance_groups) == (0.0, 0)  # over the means of trajectories


def test_advantages_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"d-0/0: advantages of shape \(11,\) for 12 tokens"):
        build_batch([audited(build_group())], TokenAdvantages(missing=1), 0, "token_mean")


def test_several_temperatures_in_one_batch_are_refused():
    with pytest.raises(UserError, match=r"temperatures \[0.7, 1.0\]"):
        batch([audited(with_tag(build_group(), 0, temperature=0.7))])


def test_raw_logprobs_of_a_tempered_sample_are_refused():
    group = build_group()
    for index in range(2):
        group = with_tag(group, index, temperature=0.7, logprob_semantics=LogprobSemantics.RAW)
    with pytest.raises(UserError, match="raw"):
        batch([audited(group)])


def test_a_loss_token_is_predicted_from_the_position_before_it():
    """The chain from span to logit: token t, its own old log-prob, and the hidden state at t - 1."""
    group = build_group(prompt_tokens=3, spans=((V1, 2), (V2, 3)))
    (micro,) = pack(batch([audited(group)], oldest=2).samples, 1, 10_000)[0]
    flat = loss_tokens(micro, torch.device("cpu"))
    rows, columns = np.divmod(flat.positions.numpy(), flat.token_ids.shape[1])
    assert columns.tolist() == [4, 5, 6] * 2
    for row, column, target, old in zip(rows, columns, flat.targets, flat.old_logprobs, strict=True):
        trajectory = next(t for t in group.trajectories if t.trajectory_id == micro.trajectory_ids[row])
        assert trajectory.token_ids[column + 1] == target
        assert trajectory.rollout_logprobs[column + 1] == old
        assert flat.token_ids[row, column] == trajectory.token_ids[column]


def test_token_versions_are_the_golden_ones(golden: dict[str, Any]):
    vector = golden["V14_spans"]
    shift = 3
    spans = tuple(
        VersionSpan(PolicyVersion(1, s["version"]), s["start"] + shift, s["end"] + shift) for s in vector["spans"]
    )
    trajectory = replace(build_trajectory(prompt_tokens=shift, spans=((V1, 6),)), version_spans=spans)
    assert trajectory.token_versions()[shift:].tolist() == vector["token_versions"]
