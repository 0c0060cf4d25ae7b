"""On real Ray: a planted gradient spike is found at its token, its step is computed again without it, the run goes on,
and the commands show it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.loop.concord_process import START_S, STEP_S, ConcordProcess, write_config
from support.loop.run_record import assert_counts_add_up, assert_record, events_of, summary_of

Start = Callable[..., ConcordProcess]
REWARD = '''
def reward(prompt, completion, trajectory):
    """Something that the members of a group differ in."""
    return float((trajectory.token_ids[trajectory.sampled] % 2 == 0).mean())
'''
STEPS, SPIKE = 6, 5
SETTINGS = (
    f"run.steps={STEPS}",
    "run.group_size=4",
    "run.deterministic=true",
    'staleness={max_staleness=0, order="dispatch"}',
    "trainer.type=fsdp",
    "trainer.micro_batch_tokens=64",
    'trainer.algorithm={type="grpo", clip_low=0.999, clip_high=1e9}',  # the scripted engine's log-probs are no policy's
    'trainer.gradloc={action="mask", threshold={type="calibrated", warmup_steps=3}}',
    f'faults.plant=[{{type="grad_spike", start_version={SPIKE}, factor=1e6}}]',
    "reward.type=python",
    "reward.function=graded:reward",
)


def output_of(process: ConcordProcess) -> str:
    """What a command said that ends in order, with its lines joined."""
    assert process.exit_status(STEP_S) == 0, process.errors
    return " ".join("".join(process.output).split())


@pytest.mark.timeout(2 * START_S + 5 * STEP_S)
def test_a_planted_spike_is_located_and_masked_and_the_run_goes_on(concord: Start, tmp_path: Path):
    config, run, module = write_config(tmp_path), tmp_path / "runs" / "run", tmp_path / "mine"
    module.mkdir()
    (module / "graded.py").write_text(REWARD)
    process = concord(
        "run",
        config,
        *(part for setting in SETTINGS for part in ("--set", setting)),
        environment={"PYTHONPATH": str(module)},
    )
    assert process.exit_status(2 * START_S) == 0, process.errors
    assert process.left_of_it() == []

    (planted,) = [event for event in events_of(run) if event["kind"] == "fault_planted"]
    (searched,) = [event for event in events_of(run) if event["kind"] == "gradloc" and event["step"] == SPIKE]
    assert (searched["outcome"], searched["trigger"], searched["acted"], searched["removed_terms"]) == (
        "located",
        "threshold",
        "masked",
        1,
    )
    assert (searched["trajectory_id"], searched["position"]) == (planted["trajectory_id"], planted["position"])
    assert searched["grad_norm"] > searched["threshold"] > searched["grad_norm_after"]

    summary = summary_of(run)
    assert (summary["version"], summary["skipped_steps"], summary["rejected"], summary["failed"]) == (STEPS, 0, {}, {})
    assert summary["trajectories"]["masked"] == 1
    assert_counts_add_up(summary)
    assert_record(run, steps=STEPS, batch_groups=3, max_staleness=0)

    shown = output_of(concord("gradloc", run, str(SPIKE)))
    assert f"step e1-v{SPIKE}: located, triggered by threshold; action mask, masked" in shown
    assert f"of {planted['trajectory_id']} position {planted['position']}, sampled under" in shown
    explained = output_of(concord("explain", run, planted["trajectory_id"]))
    assert f"gradient search of step e1-v{SPIKE} (threshold): located; culprit: token" in explained
