"""The consistency service in its own Ray actor, on real weights: what it gates, and what its death does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.loop.concord_process import MODEL, START_S, STEP_S, ConcordProcess

from rollout.store.sqlite.reader import open_reader
from trainer.types.evidence import decode_evidence
from trainer.types.step import Verdict

Start = Callable[..., ConcordProcess]
STEPS = 10
CONFIG = """
[run]
steps = {steps}
batch_groups = 3
group_size = 2
dir = "{runs}"
name = "run"
[model]
type = "local"
path = "{model}"
[engine]
type = "torch"
num_cpus = 0
[trainer]
num_cpus = 0
[consistency]
mode = "gate"
num_cpus = 0
[cluster]
object_store_gib = 0.1
"""


@pytest.mark.timeout(3 * (START_S + STEP_S))
def test_a_gate_whose_service_is_killed_scores_every_trained_group_all_the_same(concord: Start, tmp_path: Path):
    config, run = tmp_path / "gate.toml", tmp_path / "runs" / "run"
    config.write_text(CONFIG.format(steps=STEPS, runs=tmp_path / "runs", model=MODEL))
    process = concord("run", config)
    process.until_step(2)
    process.kill_actor("ConsistencyActor")
    assert process.exit_status() == 0, process.errors
    assert process.left_of_it() == []
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["version"], summary["consistency"]["degraded_steps"]) == (STEPS, 0)
    assert set(summary["consistency"]["verdicts"]) == {"accept"}
    assert "consistency-0" in summary["peak_rss_mb"]
    assert (
        float(summary["consistency"]["gap_mean_nats"]["0"]) < 1e-5
    )  # the torch engine in fp32, its KV recomputed over updates
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert (kinds.count("auditor_lost"), kinds.count("consistency_finding")) == (1, 0)
    assert_every_trained_token_was_scored(run)


def assert_every_trained_token_was_scored(run: Path) -> None:
    reader = open_reader(run)
    try:
        trained = [dispatch_id for commit in reader.commits() for dispatch_id in commit.dispatch_ids]
        assert len(trained) == 3 * STEPS
        for dispatch_id in trained:
            evidence, group = (
                decode_evidence(reader.annotations(dispatch_id)[-1].payload),
                reader.read_group(dispatch_id),
            )
            assert group is not None
            for found, trajectory in zip(evidence.trajectories, group.trajectories, strict=True):
                assert found.verdict is Verdict.ACCEPT
                assert found.scored[trajectory.sampled].all()
    finally:
        reader.close()
