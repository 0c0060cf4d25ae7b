"""What rows alone say of engines, blocks and time; and what they must not be taken for."""

import pytest
from support.loop.doctor_runs import MadeUpRun, healthy
from support.loop.doctor_scenarios import groups_of, noisily

from orchestrator.doctor.diagnosis import diagnose
from orchestrator.doctor.findings import Severity
from orchestrator.metrics.causes import Cause


def causes(run: MadeUpRun) -> list[Cause]:
    return [one.cause for one in diagnose(run.record()).findings if one.severity is not Severity.INFO]


@pytest.mark.parametrize("seed", range(3))
def test_one_seed_for_all_samples_is_no_lack_of_difference_in_the_prompts(seed: int):
    run = healthy(seed)
    groups_of(wrong=0.5, right=0.5, reward=0.5)(run)
    assert causes(run) == [Cause.GROUPS_ALIKE]
    run.set("sample_repeats", lambda t: 1.0)
    run.set("sample_repeats_expected", noisily(lambda t: 0.4, 0.03, seed))
    assert causes(run)[0] is Cause.REPEATED_SAMPLES


def test_samples_of_a_certain_policy_repeat_and_are_no_finding():
    run = healthy(0)
    run.set("sample_repeats", noisily(lambda t: 0.3 + 0.65 * t, 0.03))
    run.set("sample_repeats_expected", lambda t: 0.3 + 0.65 * t)
    assert diagnose(run.record()).primary is None


def test_a_gap_on_tokens_of_the_very_same_weights_is_a_disagreement_and_one_of_older_tokens_is_none():
    run = healthy(0)
    run.set("token_staleness_max", lambda t: 1.0, since=1)
    run.set("abs_rollout_difference_mean", lambda t: 0.2, since=1)
    assert causes(run) == []
    run.rows[0]["abs_rollout_difference_mean"] = 0.4
    found = diagnose(run.record()).primary
    assert found is not None and (found.cause, found.since) == (Cause.UNKNOWN_GAP, 1)
    long_ago = healthy(0, 300)
    long_ago.set("token_staleness_max", lambda t: 1.0, since=1)
    long_ago.rows[0]["abs_rollout_difference_mean"] = 0.4
    assert causes(long_ago) == []


def test_a_run_that_waits_for_generation_says_so_as_info_with_the_share():
    run = healthy(0)
    for name, value in (("step_seconds", 10.0), ("step_wait_seconds", 8.0), ("generation_seconds", 7.0)):
        run.set(name, lambda t, value=value: value)
    found = [one for one in diagnose(run.record()).findings if one.cause is Cause.TRAINER_WAITS]
    assert [one.severity for one in found] == [Severity.INFO]
    assert "80%" in found[0].summary


def test_a_block_without_a_gradient_is_named():
    run = healthy(0)
    for block, norm in (("embeddings", 0.0), ("layers.0", 0.3)):
        run.blocks["block_grad_norm", block] = {int(row["step"]): norm for row in run.rows}
    found = diagnose(run.record()).primary
    assert found is not None and found.cause is Cause.FROZEN_BLOCK and found.summary.startswith("embeddings ")


def test_blocks_that_all_have_no_gradient_in_a_step_without_differences_are_not_frozen():
    run = healthy(0)
    for block in ("embeddings", "layers.0"):
        run.blocks["block_grad_norm", block] = {int(row["step"]): 0.0 for row in run.rows}
    assert causes(run) == []


def test_a_bf16_trainer_against_a_float32_engine_is_one_info_with_the_measured_gap():
    run = healthy(0)
    for replica in range(3):
        run.event("consistency_baseline", 1, replica=replica, mean_abs_nats=0.012, trainer_rounding_nats=0.011)
    found = diagnose(run.record())
    assert found.primary is None and found.untrusted == ()
    precision = [one for one in found.findings if one.cause is Cause.PRECISION]
    assert [one.severity for one in precision] == [Severity.INFO]
    assert "0.012 nats" in precision[0].summary and "0.011" in precision[0].summary
